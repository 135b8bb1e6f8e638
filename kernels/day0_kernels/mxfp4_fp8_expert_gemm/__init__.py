"""Matrix product per expert of FP8 rows and MXFP4 weights read as they are: spec, reference, and backends."""
