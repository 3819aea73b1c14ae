"""A fleet of simulated engines behind the real router, on one virtual clock; runs are repeatable."""
