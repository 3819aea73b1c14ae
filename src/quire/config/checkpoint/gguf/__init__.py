"""GGUF files: header, tensors, and the config that the header stands for."""
