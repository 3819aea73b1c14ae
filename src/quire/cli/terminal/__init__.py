"""Commands that draw in a terminal."""
