"""Causal depthwise convolution with a carried tail: spec, reference, and backends beside them."""
