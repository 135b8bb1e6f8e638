"""Choosing the positions a query attends to: spec, reference, and backends beside them."""
