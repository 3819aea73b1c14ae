"""Measures every figure of docs/performance.md; see `python -m benchmarks --help`.

This module imports nothing of Quire, because parts of the package run in the environments of other engines.
"""
