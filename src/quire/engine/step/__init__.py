"""Carrying out a step, and what its result changes."""
