"""The gates before and behind the delta rule: spec, reference, and backends beside them."""
