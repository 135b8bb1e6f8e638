"""Absorbed latent attention over chosen positions: spec, reference, and backends beside them."""
