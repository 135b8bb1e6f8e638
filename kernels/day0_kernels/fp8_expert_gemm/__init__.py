"""Matrix product per expert over grouped rows, FP8 weights with one scale a block: spec, reference, and backends."""
