"""Executors of an engine that is several processes: this one, and ranks that compute a part of each step."""
