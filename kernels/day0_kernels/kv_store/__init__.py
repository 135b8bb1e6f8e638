"""Storing rows in a block cache: spec, reference, and backends beside them."""
