"""Families that differ from Llama in a few values."""
