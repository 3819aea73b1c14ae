"""The tensors in a checkpoint folder: their names, places and bytes. This package does not import torch."""
