"""Every figure of docs/performance.md as one command; `python -m benchmarks --help`. Imports nothing of Quire: parts of
it run in the environments of other engines."""
