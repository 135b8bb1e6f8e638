"""Settings name what is wrong with them."""

from __future__ import annotations

import pydantic
import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from svc_common.settings import ServiceSettings, SettingsError, read_settings


class ExampleSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="DAY0_EXAMPLE_")

    replicas: list[str] = Field(default_factory=list)
    weights: dict[str, int] = Field(default_factory=dict)
    model: str | None = None
    ratio: float = 0.5


def test_reads_only_variables_with_the_prefix() -> None:
    settings = read_settings(ExampleSettings, {"DAY0_EXAMPLE_GRPC_PORT": "7", "GRPC_PORT": "8", "DAY0_OTHER_X": "9"})
    assert settings.grpc_port == 7
    assert settings.health_port == 50052


def test_construction_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAY0_EXAMPLE_GRPC_PORT", "7")
    assert ExampleSettings().grpc_port == 50051
    assert read_settings(ExampleSettings, {}).grpc_port == 50051


def test_lists_and_mappings() -> None:
    settings = read_settings(
        ExampleSettings, {"DAY0_EXAMPLE_REPLICAS": "a:1, b:2", "DAY0_EXAMPLE_WEIGHTS": '{"a": 1048576}'}
    )
    assert settings.replicas == ["a:1", "b:2"]
    assert settings.weights == {"a": 1048576}
    assert read_settings(ExampleSettings, {"DAY0_EXAMPLE_REPLICAS": '["a,b"]'}).replicas == ["a,b"]


def test_large_integer_survives() -> None:
    assert read_settings(ExampleSettings, {"DAY0_EXAMPLE_MAX_MESSAGE_BYTES": "1048576"}).max_message_bytes == 1048576
    with pytest.raises(SettingsError, match=r"DAY0_EXAMPLE_MAX_MESSAGE_BYTES.*1\.5e\+06"):
        read_settings(ExampleSettings, {"DAY0_EXAMPLE_MAX_MESSAGE_BYTES": "1.5e+06"})


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("DAY0_EXAMPLE_GRPC_PORT", "abc", r"DAY0_EXAMPLE_GRPC_PORT: .*integer.*'abc'"),
        ("DAY0_EXAMPLE_GRPC_PORT", "70000", r"DAY0_EXAMPLE_GRPC_PORT: .*65535.*'70000'"),
        ("DAY0_EXAMPLE_GRPC_PORT", "", r"DAY0_EXAMPLE_GRPC_PORT: .*''"),
        ("DAY0_EXAMPLE_DRAIN_SECONDS", "nan", r"DAY0_EXAMPLE_DRAIN_SECONDS: .*'nan'"),
        ("DAY0_EXAMPLE_LOG_FORMAT", "xml", r"DAY0_EXAMPLE_LOG_FORMAT: .*'json' or 'text'.*'xml'"),
        ("DAY0_EXAMPLE_WEIGHTS", "{", r"DAY0_EXAMPLE_WEIGHTS: not valid JSON.*'\{'"),
        ("DAY0_EXAMPLE_WEIGHTS", '{"a": "x"}', r"DAY0_EXAMPLE_WEIGHTS\.A: .*'x'"),
        (
            "DAY0_EXAMPLE_GRPC_PROT",
            "1",
            r"DAY0_EXAMPLE_GRPC_PROT: no such setting, did you mean DAY0_EXAMPLE_GRPC_PORT\?",
        ),
        ("day0_example_grpc_port", "1", None),
        ("DAY0_EXAMPLE_PORT_50051_TCP_ADDR", "10.0.0.1", r"enableServiceLinks: false"),
        ("DAY0_EXAMPLE_SERVICE_HOST", "10.0.0.1", r"enableServiceLinks: false"),
    ],
)
def test_bad_variable_is_named(variable: str, text: str, message: str | None) -> None:
    if message is None:
        assert read_settings(ExampleSettings, {variable: text}).grpc_port == 50051
        return
    with pytest.raises(SettingsError, match=message):
        read_settings(ExampleSettings, {variable: text})


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings(ExampleSettings, {"DAY0_EXAMPLE_A": "1", "DAY0_EXAMPLE_B": "2"})
    assert "DAY0_EXAMPLE_A" in str(caught.value)
    assert "DAY0_EXAMPLE_B" in str(caught.value)


def test_overrides_win_and_are_checked() -> None:
    environ = {"DAY0_EXAMPLE_GRPC_PORT": "7"}
    assert read_settings(ExampleSettings, environ, {"grpc_port": 9}).grpc_port == 9
    with pytest.raises(SettingsError, match=r"^grpc_port: .*-1"):
        read_settings(ExampleSettings, environ, {"grpc_port": -1})
    with pytest.raises(SettingsError, match=r"grpc_prot: no such setting of ExampleSettings"):
        read_settings(ExampleSettings, environ, {"grpc_prot": 1})


def test_missing_required_setting_is_named() -> None:
    class NeedsModel(ServiceSettings):
        model_config = SettingsConfigDict(env_prefix="DAY0_NEEDS_")
        model: str

    with pytest.raises(SettingsError, match="DAY0_NEEDS_MODEL: required, not set"):
        read_settings(NeedsModel, {})


def test_settings_are_frozen() -> None:
    settings = read_settings(ExampleSettings, {})
    with pytest.raises(pydantic.ValidationError):
        settings.grpc_port = 1  # type: ignore[misc]
