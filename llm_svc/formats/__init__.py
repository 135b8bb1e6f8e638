"""Weights as checkpoints store them, brought into the one layout the operators read."""
