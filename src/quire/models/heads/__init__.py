"""Draft heads: small networks that read a model's hidden states and guess its next tokens."""
