"""Mixtures of experts: their kernels, and what these take."""
