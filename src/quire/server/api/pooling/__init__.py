"""Embeddings, scores, rerankings, classes and other pooled vectors."""
