"""Text to tokens and back, chat templates, grammars. No torch here."""
