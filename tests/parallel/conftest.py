"""Checkpoints of the tests of models."""

from tests.models.conftest import folder, llama, save_checkpoint

__all__ = ["folder", "llama", "save_checkpoint"]
