"""What the backend of the native extension is made of."""
