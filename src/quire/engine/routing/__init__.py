"""Which of several engines gets a request."""
