"""Trains the embedded demo model, from its data to its checkpoint."""
