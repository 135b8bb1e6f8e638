"""Operators as data: what each computes, its float32 definition, and the backends that claim to equal it."""
