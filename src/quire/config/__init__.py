"""Frozen value objects that say what an engine is: model, cache, scheduler, parallelism."""
