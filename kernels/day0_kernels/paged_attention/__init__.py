"""Decode attention over whole paged sequences, latent and grouped-query: spec, reference, and backends beside them."""
