"""The engine: who runs, in what order, and what becomes of their tokens."""
