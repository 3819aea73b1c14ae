"""The web page: playground and live view."""
