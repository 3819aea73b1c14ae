"""The decoder that every family of causal language models describes: a description, and the modules built from it."""
