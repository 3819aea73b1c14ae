"""Tokenizing and detokenizing."""
