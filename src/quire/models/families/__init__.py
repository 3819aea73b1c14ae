"""One file for each architecture family."""
