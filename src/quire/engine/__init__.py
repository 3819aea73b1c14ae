"""The engine: who runs, in what order, and what becomes of their tokens."""

from pathlib import Path

# vLLM's modules that Quire has elsewhere: see quire/interfaces/compat/__init__.py
__path__.append(str(Path(__file__).parents[1] / "interfaces" / "compat" / "engine"))
