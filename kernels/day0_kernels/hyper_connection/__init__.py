"""Mixing residual streams: spec, reference, and backends beside them."""
