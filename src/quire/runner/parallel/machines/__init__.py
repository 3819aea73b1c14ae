"""Several machines that compute one engine's steps: how they find each other, and what each runs."""
