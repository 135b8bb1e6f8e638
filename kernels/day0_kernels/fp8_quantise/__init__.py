"""Rows as FP8 with power-of-two scales, a row's or a group's: spec, reference, and backends beside them."""
