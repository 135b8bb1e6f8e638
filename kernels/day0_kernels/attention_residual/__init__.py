"""Attention over earlier block outputs: spec, reference, and backends beside them."""
