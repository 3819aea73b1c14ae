"""Programs for those who work on Quire: benchmarks, checks and a server for the page."""
