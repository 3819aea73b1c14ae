"""The prefix cache: what computed blocks contain, how it is found again, and when it is evicted."""
