"""Absorbed latent attention over chosen rows of an FP8 cache: spec, reference, and backends beside them."""
