"""Where a Batch is carried out."""

from typing import Protocol

from quire.common.batch import Batch, StepResult


class Executor(Protocol):
    """Runs steps, in this process or in others. Owns weights and cache memory; knows nothing of requests."""

    def execute(self, batch: Batch) -> StepResult:
        """Move blocks, run the model, draw tokens. An exception leaves every request as it was before the step."""
        ...
