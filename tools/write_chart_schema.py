"""Writes the settings of each service into helm/values.schema.json; the rest of that file is written by hand."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The services are packages of this folder, whatever folder the command is called from.
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from llm_svc.settings import LlmSettings  # noqa: E402
from router_svc.settings import RouterSettings  # noqa: E402
from svc_common.settings import ServiceSettings  # noqa: E402
from tools.document_settings import attribute_docstrings  # noqa: E402
from vision_svc.settings import VisionSettings  # noqa: E402

SCHEMA = ROOT / "helm" / "values.schema.json"
SERVICES: dict[str, type[ServiceSettings]] = {
    "router_svc": RouterSettings,
    "vision_svc": VisionSettings,
    "llm_svc": LlmSettings,
}
_PORTS = {"host", "grpc_port", "health_port", "metrics_port"}
# What the chart sets itself, from other values.
OWNED: dict[str, set[str]] = {
    "router_svc": _PORTS | {"llm_targets"},
    "vision_svc": _PORTS | {"model", "model_name", "require_manifest"},
    "llm_svc": _PORTS | {"model", "model_name", "require_manifest", "vision_target"},
}
# Helm keeps numbers of YAML as float64. What is larger is written as a string.
MAX_EXACT_INTEGER = 2**53 - 1
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def field_schema(field: dict[str, Any]) -> dict[str, Any]:
    """A value in YAML for one field of a pydantic schema; numbers and booleans may be strings (--set-string)."""
    bounds = {name: field[name] for name in _BOUNDS if name in field}
    match field:
        case {"enum": choices}:
            return {"enum": choices}
        case {"const": choice}:
            return {"enum": [choice]}
        case {"type": "integer"}:
            bounds.setdefault("maximum", MAX_EXACT_INTEGER)
            return {"type": ["integer", "string"], "pattern": "^-?[0-9]+$", **bounds}
        case {"type": "number"}:
            return {"type": ["number", "string"], "pattern": r"^-?[0-9]+(\.[0-9]+)?$", **bounds}
        case {"type": "boolean"}:
            return {"type": ["boolean", "string"], "pattern": "^(true|false)$"}
        case {"type": "array", "prefixItems": items}:
            shown = [field_schema(item) for item in items]
            return {"type": "array", "items": shown, "minItems": len(items), "maxItems": len(items)}
        case {"type": "array", "items": {"type": "string"}}:
            # A comma separates the items of a variable.
            return {"type": "array", "items": {"type": "string", "pattern": "^[^,]+$"}}
        case {"type": "string"}:
            return {"type": "string"}
    raise ValueError(f"no rule for a setting of this kind: {field}")


def settings_schema(service: str) -> dict[str, Any]:
    """What may stand under `SERVICE.settings`."""
    cls = SERVICES[service]
    docstrings = attribute_docstrings(cls)
    properties = {}
    for name, field in cls.model_json_schema()["properties"].items():
        if name in OWNED[service]:
            continue
        meaning = field.get("description") or docstrings.get(name, "")
        properties[name] = {"description": meaning, **field_schema(field)}
    return {
        "type": "object",
        "additionalProperties": False,
        # The pod's grace period follows from it.
        "required": ["drain_seconds"],
        "properties": properties,
    }


def main() -> None:
    """Write the schema, or where `--out` says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=SCHEMA)
    schema = json.loads(SCHEMA.read_text())
    for service in SERVICES:
        schema["definitions"][f"{service}_settings"] = settings_schema(service)
    parser.parse_args().out.write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
