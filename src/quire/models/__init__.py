"""One readable file per architecture family, and how a checkpoint's weights get into it."""
