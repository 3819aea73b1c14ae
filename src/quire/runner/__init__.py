"""Executes a Batch: memory, weights, input tensors, forward pass, sampling."""
