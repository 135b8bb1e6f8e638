"""Compares an adopted definition with unmodified upstream, operator by operator, on the same inputs."""
