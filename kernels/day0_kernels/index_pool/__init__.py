"""Pooling indexer keys: spec, reference, and backends beside them."""
