"""Drafts: tokens that are proposed to come next, and how many of them a step verifies. Nothing here imports torch."""
