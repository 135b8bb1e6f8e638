"""The gate between an expert's two products, with and without quantisation behind it: spec, reference, and backends."""
