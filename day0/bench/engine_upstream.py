"""Times unmodified transformers at the same shapes, in a process of its own: `python -m day0.bench.engine_upstream`.

Reads one JSON object from standard input: `config` (a folder), `device`, `dtype`, `batches`, `contexts`, `prefills`,
`steps`. The weights are random and plain (no MXFP4: the definition has none). Writes a JSON object a line as it goes;
what does not fit into the memory of a GPU is a line that says so.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, DynamicCache

from svc_common.versions import versions_of

WARM_UP_STEPS = 3
DEVIATION = 0.02


def main() -> None:
    asked = json.load(sys.stdin)
    config = AutoConfig.from_pretrained(asked["config"], local_files_only=True)
    model = _random_model(config, getattr(torch, asked["dtype"]), torch.device(asked["device"]))
    _say(kind="built", versions=versions_of("transformers", "fla-core", "causal-conv1d", "torch"))
    for tokens in asked["prefills"]:
        _tell("prefill", {"tokens": tokens}, lambda tokens=tokens: _prefill_row(model, config, tokens))
    for context in asked["contexts"]:
        for batch in asked["batches"]:
            _tell(
                "decode",
                {"batch": batch, "context_tokens": context},
                lambda batch=batch, context=context: _decode_row(model, config, batch, context, asked["steps"]),
            )


def _random_model(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The whole definition, made where it runs."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0, DEVIATION)
    return model


def _tell(kind: str, of: dict[str, int], measure: Any) -> None:
    try:
        found = measure()
    except torch.OutOfMemoryError:
        found = {"error": "out of memory"}
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _say(kind=kind, **of, **found)


@torch.inference_mode()
def _forward(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """The greedy ids behind the last token, as generation would take them."""
    out = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
    chosen: torch.Tensor = out.logits[:, -1].argmax(-1)
    return chosen


def _new(model: Any, config: Any, batch: int, tokens: int) -> tuple[Any, torch.Tensor, float]:
    """Cache, next ids, and the seconds of a prefill."""
    text_config = config.get_text_config()
    ids = torch.randint(0, text_config.vocab_size, (batch, tokens), device=model.device)
    cache = DynamicCache(config=text_config)
    began = time.perf_counter()
    chosen = _forward(model, ids, cache)
    # The ids on the host end the measurement, as in our own steps.
    chosen.tolist()
    return cache, chosen, time.perf_counter() - began


def _prefill_row(model: Any, config: Any, tokens: int) -> dict[str, Any]:
    if tokens <= 16384:
        # The first of a length compiles; longer ones take seconds, of which that is little.
        _new(model, config, 1, tokens)
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = _new(model, config, 1, tokens)[2]
    return {"seconds": seconds, "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0}


def _decode_row(model: Any, config: Any, batch: int, context: int, steps: int) -> dict[str, Any]:
    cache, chosen, _ = _new(model, config, batch, context)
    times = []
    for _ in range(WARM_UP_STEPS + steps):
        began = time.perf_counter()
        chosen = _forward(model, chosen[:, None], cache)
        chosen.tolist()
        times.append(time.perf_counter() - began)
    return {"decode_ms": statistics.median(times[WARM_UP_STEPS:]) * 1e3}


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
