"""Measurements of running services, by the names and definitions of `vllm bench`."""
