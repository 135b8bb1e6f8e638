"""From gate logits to rows sorted by expert and back: spec, reference, and backends."""
