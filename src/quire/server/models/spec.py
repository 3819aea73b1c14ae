"""ModelSpec: a model that the server offers, before it is loaded."""

from dataclasses import dataclass

from quire.config.args import EngineArgs
from quire.config.checkpoint.location import EMBEDDED_CHECKPOINTS


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Under which names a model is served, and the arguments of its engine."""

    names: tuple[str, ...]
    """At least one; responses to requests that name no model use the first."""
    engine: EngineArgs

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def checkpoint(self) -> str:
        """The folder, hub id or embedded checkpoint."""
        return self.engine.model or EMBEDDED_CHECKPOINTS[0]

    def has_name(self, name: str) -> bool:
        """Whether requests for this name mean the model. Clients of Ollama may add `:latest`."""
        return name in self.names or name.removesuffix(":latest") in self.names
