"""Encoders: what tells each family from BERT."""
