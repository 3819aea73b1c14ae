"""The HTTP server: OpenAI-compatible endpoints, the live page, and what operating them takes."""
