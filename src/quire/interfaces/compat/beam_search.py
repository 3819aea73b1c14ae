"""vLLM's module of the outputs of beam search."""

from quire.common.outputs import BeamSearchOutput, BeamSearchSequence

__all__ = ["BeamSearchOutput", "BeamSearchSequence"]
