"""One line per record, whatever is in it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from svc_common.logs import configure_logging, current_request_id, get_logger


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_line_has_all_fields(stream: io.StringIO) -> None:
    configure_logging("llm", "json", "info", stream=stream)
    token = current_request_id.set("abc")
    get_logger("day0.x").info("took %d", 3, extra={"seconds": 0.5, "odd": float("nan"), "thing": object})
    get_logger("day0.x").debug("not at this level")
    current_request_id.reset(token)
    (line,) = stream.getvalue().splitlines()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["ts"].endswith("+00:00")
    del record["ts"]
    assert record == {
        "level": "info",
        "service": "llm",
        "logger": "day0.x",
        "message": "took 3",
        "request_id": "abc",
        "seconds": 0.5,
        "odd": "nan",
        "thing": "<class 'object'>",
    }


def test_record_can_name_its_request(stream: io.StringIO) -> None:
    configure_logging("llm", "json", "INFO", stream=stream)
    get_logger("day0.x").info("a", extra={"request_id": "other"})
    get_logger("day0.x").info("b")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["request_id"], second["request_id"]) == ("other", "")


@pytest.mark.parametrize("format", ["json", "text"])
def test_hostile_text_stays_on_its_line(stream: io.StringIO, format: str) -> None:
    configure_logging("llm", format, "INFO", stream=stream)  # type: ignore[arg-type]
    get_logger("day0.x").info("a\r\nforged\x1b[2J\x85 line \ud800", extra={"label": "b\nforged"})
    assert len(stream.getvalue().splitlines()) == 1
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("format", ["json", "text"])
def test_traceback_is_kept(stream: io.StringIO, format: str) -> None:
    configure_logging("llm", format, "INFO", stream=stream)  # type: ignore[arg-type]
    try:
        raise KeyError("gone")
    except KeyError:
        get_logger("day0.x").exception("failed")
    assert "KeyError: 'gone'" in stream.getvalue().replace('\\"', '"')
    if format == "json":
        assert "Traceback" in json.loads(stream.getvalue())["exception"]


def test_text_line_is_readable(stream: io.StringIO) -> None:
    configure_logging("llm", "text", "INFO", stream=stream)
    token = current_request_id.set("abc")
    get_logger("day0.x").warning("slow", extra={"seconds": 2})
    current_request_id.reset(token)
    assert stream.getvalue().rstrip().endswith("WARNING llm day0.x: slow request_id=abc seconds=2")


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        configure_logging("llm", "json", "loud")
