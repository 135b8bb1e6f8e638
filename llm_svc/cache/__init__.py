"""Blocks, state slots and snapshots: who holds which row of the caches."""
