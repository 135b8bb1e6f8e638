"""The child process that renders a checkpoint's chat template; a program of its own that knows jinja2 and not us.

It reads one framed JSON object after another from standard input and answers each with one on standard output. A frame
is an unsigned 64-bit little-endian byte count, then that many bytes. The first object is `{"template", "cpu_seconds",
"memory_bytes", "output_bytes"}`; each later one is `{"messages", "variables"}`. Answers: `{}` (ready), `{"text"}`,
`{"refused"}` (the template called raise_exception) or `{"failed"}` (it broke). A render that takes more than
`cpu_seconds` of processor time gets no answer: the kernel ends the process with SIGPROF, whatever it is doing.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any, BinaryIO

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

FRAME = struct.Struct("<Q")


class RefusedByTemplate(Exception):
    """The template called raise_exception."""


class GenerationTag(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks an assistant's tokens for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain set

    def parse(self, parser: Any) -> Any:
        """Replaces the tag by its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _raise_exception(message: object) -> None:
    raise RefusedByTemplate(str(message))


def _to_json(
    value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def compile_template(source: str) -> jinja2.Template:
    """Compiles with the settings of transformers' `_compile_jinja_template`, so that both render the same text."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _read(stream: BinaryIO) -> Any:
    head = stream.read(FRAME.size)
    if len(head) < FRAME.size:
        return None
    (size,) = FRAME.unpack(head)
    return json.loads(stream.read(size))


def _write(stream: BinaryIO, answer: dict[str, str]) -> None:
    body = json.dumps(answer).encode()
    stream.write(FRAME.pack(len(body)) + body)
    stream.flush()


def _render(template: jinja2.Template, message: Any, output_bytes: int) -> dict[str, str]:
    try:
        text = template.render(messages=message["messages"], tools=None, documents=None, **message["variables"])
    except RefusedByTemplate as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"failed": "it ran out of memory"}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:2000]}
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > output_bytes:
        return {"failed": f"it wrote {size} bytes, more than {output_bytes}"}
    return {"text": text}


def _close_to_limit(memory_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        memory_bytes = min(memory_bytes, hard)
    # Some systems (macOS) do not limit address space; processor time is limited everywhere.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, hard))
    # A killed render leaves no core file behind.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> int:
    """Serves until standard input ends."""
    # A terminal's ctrl-C goes to the whole group; the parent decides when we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    setup = _read(requests)
    if setup is None:
        return 0
    _close_to_limit(setup["memory_bytes"])
    signal.setitimer(signal.ITIMER_PROF, setup["cpu_seconds"])
    try:
        template = compile_template(setup["template"])
    except Exception as error:
        _write(answers, {"failed": f"{type(error).__name__}: {error}"[:2000]})
        return 0
    signal.setitimer(signal.ITIMER_PROF, 0)
    _write(answers, {})
    while (message := _read(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, setup["cpu_seconds"])
        answer = _render(template, message, setup["output_bytes"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answers, answer)
    return 0


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main())
