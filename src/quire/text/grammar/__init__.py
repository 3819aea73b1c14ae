"""Structured output: which tokens may come next in a sequence, by its request's grammar. Does not import torch."""
