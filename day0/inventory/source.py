"""Turns what a user names as a model into upstream's configuration of it; builds nothing and reads no weight."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svc_common.object_store import ObjectStore
from svc_common.store_errors import StoreError


class InventoryError(ValueError):
    """The model cannot be read; the message says which file, field or name is wrong, and what would be right."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A configuration and where it came from: a file, a folder, or "defaults of transformers"."""

    name: str
    origin: str
    config: Any


def read_model(model: str) -> ModelSource:
    """`model` is a config.json, a folder or URI that holds one, or a model type of transformers. InventoryError."""
    path = Path(model)
    if path.is_file():
        return _from_content(model, path.read_bytes())
    if path.is_dir() or "://" in model:
        return _from_content(f"{model.rstrip('/')}/config.json", _config_in(model))
    if "/" in model or model.endswith(".json"):
        raise InventoryError(f"MODEL: {model} is no file and no folder")
    return ModelSource(model, "defaults of transformers", _make(model, {}, "MODEL"))


def _config_in(folder: str) -> bytes:
    try:
        store = ObjectStore(folder)
        file = next((file for file in store.list() if file.name == "config.json"), None)
        if file is None:
            raise InventoryError(f"MODEL: {folder} has no config.json")
        return store.read(file)
    except StoreError as error:
        raise InventoryError(f"MODEL: {error}") from None


def _from_content(where: str, content: bytes) -> ModelSource:
    try:
        fields = json.loads(content)
    except ValueError as error:
        raise InventoryError(f"MODEL: {where} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InventoryError(f"MODEL: {where} must hold an object, holds {type(fields).__name__}")
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        raise InventoryError(f"MODEL: {where} has no model_type")
    return ModelSource(model_type, where, _make(model_type, fields, where))


def _make(model_type: str, fields: dict[str, Any], where: str) -> Any:
    """Upstream's configuration object; what it refuses is said in its own words."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        known = list(CONFIG_MAPPING.keys())
        near = difflib.get_close_matches(model_type, known, n=4, cutoff=0.5)
        hint = f"; near are {', '.join(near)}" if near else ""
        raise InventoryError(
            f"{where}: model_type {model_type!r} is not among the {len(known)} that this transformers knows{hint}"
        )
    try:
        cls = CONFIG_MAPPING[model_type]
        return cls.from_dict(fields) if fields else cls()
    except Exception as error:  # a configuration class may refuse its fields in any way
        raise InventoryError(f"{where}: {cls.__name__} refuses: {type(error).__name__}: {error}") from error
