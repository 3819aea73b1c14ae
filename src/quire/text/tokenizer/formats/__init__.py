"""The formats in which checkpoints keep a vocabulary when they have no tokenizer.json. Nothing in them is executed."""
