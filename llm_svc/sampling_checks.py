"""Sampling messages to SamplingParams: ranges, caps and the checkpoint's defaults; knows no prompt."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_svc.core import SamplingParams
from llm_svc.request_limits import RequestLimits, check_range, check_size
from llm_svc.sampler import GREEDY_TEMPERATURE
from protos.common.v1 import common_pb2
from svc_common.errors import InvalidArgument

# Lowest and highest value, and whether the lowest itself is excluded. One rule for every entry point.
RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0, 2, False),
    "top_p": (0, 1, True),
    "top_k": (0, 2**31 - 1, False),
    "min_p": (0, 1, False),
    "presence_penalty": (-2, 2, False),
    "frequency_penalty": (-2, 2, False),
    "repetition_penalty": (0, 2, True),
}
BIAS_LIMIT = 100.0


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a field that the request leaves out means: the checkpoint's generation_config, else the proto's value."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            low, high, low_open = RANGES[name]
            value = getattr(self, name)
            if not (low <= value <= high) or (low_open and value == low):
                raise ValueError(f"generation_config: {name} must be in [{low}, {high}], got {value}")

    @classmethod
    def from_generation_config(cls, config: dict[str, Any]) -> GenerationDefaults:
        """`config` is the content of generation_config.json; a checkpoint that does not sample is greedy by default."""
        known = {name: config[name] for name in cls.__slots__ if config.get(name) is not None}
        known["temperature"] = known.get("temperature", 1.0) if config.get("do_sample") else 0.0
        return cls(**known)

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> GenerationDefaults:
        """Reads generation_config.json of a checkpoint folder, where there is one."""
        return cls.from_generation_config(_read_json(Path(path) / "generation_config.json"))


def read_eos_ids(path: str | Path) -> frozenset[int]:
    """End tokens of a checkpoint folder: generation_config.json's, else config.json's (or its text_config's)."""
    folder = Path(path)
    config = _read_json(folder / "config.json")
    for source in (_read_json(folder / "generation_config.json"), config, config.get("text_config") or {}):
        eos = source.get("eos_token_id")
        if eos is not None:
            return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset()


def read_sampling(
    message: common_pb2.SamplingParams,
    *,
    limits: RequestLimits,
    defaults: GenerationDefaults,
    eos_ids: frozenset[int],
    context_tokens: int,
    vocab_size: int,
) -> SamplingParams:
    """Checks every field; raises InvalidArgument for a bad value and ResourceExhausted for too much of something.

    The end tokens are among `stop_token_ids` unless the request ignores them.
    """
    chosen: dict[str, Any] = {}
    for name, (low, high, low_open) in RANGES.items():
        value = getattr(message, name) if message.HasField(name) else getattr(defaults, name, 0)  # type: ignore[arg-type]
        check_range(f"sampling.{name}", value, low, high, low_open=low_open)
        chosen[name] = value
    if chosen["temperature"] < GREEDY_TEMPERATURE:
        chosen["temperature"] = 0.0

    choices = message.n if message.HasField("n") else 1
    check_range("sampling.n", choices, 1, 2**31 - 1)
    check_size("sampling.n", "choices", choices, limits.max_choices)
    logprobs = message.logprobs if message.HasField("logprobs") else None
    if logprobs is not None:
        check_range("sampling.logprobs", logprobs, 0, limits.max_logprobs)

    check_size("sampling.stop_token_ids", "ids", len(message.stop_token_ids), limits.max_stop_token_ids)
    for token_id in message.stop_token_ids:
        check_range("sampling.stop_token_ids", token_id, 0, vocab_size - 1)
    return SamplingParams(
        **chosen,
        max_tokens=_read_max_tokens(message, choices, limits, context_tokens),
        seed=message.seed if message.HasField("seed") else secrets.randbits(64),
        logit_bias=_read_bias(message, limits, vocab_size),
        stop=_read_stops(message, limits),
        stop_token_ids=frozenset(message.stop_token_ids) | (frozenset() if message.ignore_eos else eos_ids),
        n=choices,
        logprobs=logprobs,
        ignore_eos=message.ignore_eos,
    )


def _read_max_tokens(
    message: common_pb2.SamplingParams, choices: int, limits: RequestLimits, context_tokens: int
) -> int:
    if not message.HasField("max_tokens"):
        return max(1, min(context_tokens - 1, limits.max_tokens, limits.max_total_tokens // choices))
    max_tokens = message.max_tokens
    check_range("sampling.max_tokens", max_tokens, 1, 2**31 - 1)
    check_size("sampling.max_tokens", "tokens", max_tokens, limits.max_tokens)
    check_size("sampling.max_tokens", "tokens over all n choices", choices * max_tokens, limits.max_total_tokens)
    return max_tokens


def _read_stops(message: common_pb2.SamplingParams, limits: RequestLimits) -> tuple[str, ...]:
    check_size("sampling.stop", "strings", len(message.stop), limits.max_stop_strings)
    for index, stop in enumerate(message.stop):
        field = f"sampling.stop[{index}]"
        if not stop:
            raise InvalidArgument(
                f"{field}: a stop string has at least 1 character, got 0", field=field, limit=1, value=0
            )
        check_size(field, "bytes", len(stop.encode()), limits.max_stop_bytes)
    return tuple(message.stop)


def _read_bias(
    message: common_pb2.SamplingParams, limits: RequestLimits, vocab_size: int
) -> tuple[tuple[int, float], ...]:
    check_size("sampling.logit_bias", "entries", len(message.logit_bias), limits.max_logit_biases)
    for token_id, bias in message.logit_bias.items():
        check_range("sampling.logit_bias", token_id, 0, vocab_size - 1)
        check_range(f"sampling.logit_bias[{token_id}]", bias, -BIAS_LIMIT, BIAS_LIMIT)
    return tuple(sorted(message.logit_bias.items()))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict), path
    return content
