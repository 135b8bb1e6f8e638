"""Binds an unmodified upstream definition to our operators."""
