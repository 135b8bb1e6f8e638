"""Per-channel gated delta rule: spec, reference, and backends beside them."""
