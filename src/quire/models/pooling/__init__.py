"""Pooling: from hidden states to embeddings, scores and classes."""
