"""The encoder that families describe: a description, and the modules built from it."""
