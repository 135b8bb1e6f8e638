"""Storing rows quantised to FP8 in block caches: spec, reference, and backends beside them."""
