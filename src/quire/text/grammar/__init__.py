"""Structured output: what may come next in a sequence, by a grammar that its request gave. No torch here."""
