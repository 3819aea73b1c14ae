"""Modules of vLLM's package `engine`, which `quire/engine/__init__.py` appends to its search path."""
