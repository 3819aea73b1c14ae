"""Tokenizers, chat templates and grammars. This package does not import torch."""
