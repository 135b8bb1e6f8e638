"""Names of files that every checkpoint folder has; knows none of their formats."""

from __future__ import annotations

INDEX_NAME = "model.safetensors.index.json"
