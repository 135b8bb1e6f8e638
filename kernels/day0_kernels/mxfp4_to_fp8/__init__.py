"""MXFP4 weights as FP8 with one scale a block, exactly or not at all: spec, reference, and backends beside them."""
