"""Matrix product per expert over grouped rows, MXFP4 weights read as they are: spec, reference, and backends."""
