"""Architectures without a class of Quire's own: transformers' modules on Quire's cache and kernels."""
