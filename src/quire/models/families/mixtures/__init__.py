"""Decoders with experts in the place of some or all MLPs."""
