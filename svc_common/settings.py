"""Settings, read once into a frozen object; knows the fields every server has, not those of one service."""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import pydantic
from pydantic import Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

SettingsT = TypeVar("SettingsT", bound="ServiceSettings")

DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024


class SettingsError(ValueError):
    """A setting is unknown or bad; the message names each one by its variable."""


class ServerSettings(pydantic.BaseModel):
    """What every server needs. A port of 0 is any free one."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", min_length=1, description="Address that all ports listen on.")
    grpc_port: int = Field(50051, ge=0, le=65535, description="Port of the service itself.")
    health_port: int = Field(50052, ge=0, le=65535, description="Port of grpc.health.v1.")
    metrics_port: int = Field(9090, ge=0, le=65535, description="Port of the Prometheus metrics, HTTP.")
    max_message_bytes: int = Field(
        DEFAULT_MAX_MESSAGE_BYTES, ge=1024, le=2**31 - 1, description="Largest message in either direction."
    )
    keepalive_seconds: float = Field(30, gt=0, le=7200, allow_inf_nan=False, description="Silence before a ping.")
    drain_seconds: float = Field(30, ge=0, le=86400, allow_inf_nan=False, description="Time running calls get to end.")
    max_concurrent_streams: int = Field(1024, ge=1, le=2**31 - 1, description="Calls served at once.")
    liveness_seconds: float = Field(
        300, gt=0, allow_inf_nan=False, description="Age of the last step, while work waits, that counts as dead."
    )
    log_format: Literal["json", "text"] = Field("json", description="One JSON object a line, or plain text.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Least level that is written.")


class ServiceSettings(ServerSettings, BaseSettings):
    """Base of one service's settings: subclass with `model_config = SettingsConfigDict(env_prefix="DAY0_X_")`.

    Constructing it reads no environment; `read_settings` takes one.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed in: the environment is read by `__main__` alone."""
        return (init_settings,)


def read_settings(
    cls: type[SettingsT], environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None
) -> SettingsT:
    """Settings from the variables with the class' prefix; `overrides` (field to value, as from a command line) win.

    Lists are written `a,b` or as JSON, mappings as JSON. Raises SettingsError that names every unknown or bad variable.
    """
    prefix = cls.model_config.get("env_prefix", "")
    assert prefix, f"{cls.__name__} sets no env_prefix"
    names = {prefix + field.upper(): field for field in cls.model_fields}
    values: dict[str, Any] = {}
    problems: list[str] = []
    for variable, text in environ.items():
        if not variable.startswith(prefix):
            continue
        field = names.get(variable)
        if field is None:
            problems.append(_unknown(variable, names))
            continue
        try:
            values[field] = _parse(cls.model_fields[field].annotation, text)
        except ValueError as exc:
            problems.append(f"{variable}: {exc}, got {text!r}")
    given = dict(overrides or {})
    for field in given:
        if field not in cls.model_fields:
            problems.append(f"{field}: no such setting of {cls.__name__}")
    if problems:
        raise SettingsError("; ".join(problems))
    values |= given
    try:
        return cls(**values)
    except pydantic.ValidationError as exc:
        raise SettingsError("; ".join(_explain(e, prefix, given) for e in exc.errors())) from None


def _unknown(variable: str, names: Mapping[str, str]) -> str:
    text = f"{variable}: no such setting"
    if re.search(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)(_\w+)?)?)$", variable):
        return text + " (Kubernetes adds it for a service of that name; set enableServiceLinks: false in the pod)"
    near = difflib.get_close_matches(variable, names, n=1)
    return text + (f", did you mean {near[0]}?" if near else "")


def _explain(error: Any, prefix: str, given: Mapping[str, Any]) -> str:
    field = str(error["loc"][0]) if error["loc"] else ""
    path = ".".join(str(part) for part in error["loc"])
    if not field:
        return str(error["msg"])
    name = path if field in given else prefix + path.upper()
    if error["type"] == "missing":
        return f"{name}: required, not set"
    return f"{name}: {error['msg']}, got {error['input']!r}"


def _parse(annotation: Any, text: str) -> Any:
    kinds = {typing.get_origin(a) or a for a in _alternatives(annotation)}
    if kinds & {list, tuple, set, frozenset}:
        if text.lstrip().startswith("["):
            return _json(text)
        return [item.strip() for item in text.split(",") if item.strip()]
    if dict in kinds:
        return _json(text)
    return text


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as exc:
        raise ValueError(f"not valid JSON ({exc.msg} at column {exc.colno})") from None
