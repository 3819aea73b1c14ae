"""Architectures without a class of Quire's own: the modules of the library transformers on Quire's cache and kernels."""
