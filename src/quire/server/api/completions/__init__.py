"""Completions of plain text."""
