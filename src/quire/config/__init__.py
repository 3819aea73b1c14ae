"""Frozen value objects that configure an engine: model, cache, scheduler, parallelism."""
