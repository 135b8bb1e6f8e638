"""Matrix product per expert over grouped rows, rows and weights both FP8: spec, reference, and backends."""
