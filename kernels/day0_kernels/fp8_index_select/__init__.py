"""Choosing the positions a query attends to, FP8 queries and keys: spec, reference, and backends beside them."""
