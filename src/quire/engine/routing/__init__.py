"""Which of several engines gets a request, and what of the machine each engine gets."""
