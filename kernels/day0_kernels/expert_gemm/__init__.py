"""Matrix product per expert over grouped rows: spec, reference, and backends beside them."""
