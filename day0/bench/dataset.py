"""Makes the requests of a benchmark from random token ids and pictures; knows no service."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from day0.client import completion_request, image_part
from protos.common.v1 import common_pb2
from protos.router.v1 import router_pb2

# Without a tokenizer: ids that are plain in every vocabulary we know. Control tokens have the first few or the last.
DEFAULT_TOKEN_IDS = range(100, 300)


class BadDataset(ValueError):
    """The requests cannot be made; the message names the option."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the requests look like; lengths in tokens, as the options of `vllm bench serve` of the same names.

    A length is drawn from [floor(len * (1 - range_ratio)), ceil(len * (1 + range_ratio))]. The prefix is the same in
    every request and comes on top of the input length. Each request has `images` pictures of `image_size` (width,
    height) pixels in front of its tokens; no two pictures are the same.
    """

    num_prompts: int
    input_len: int
    output_len: int
    prefix_len: int = 0
    range_ratio: float = 0.0
    images: int = 0
    image_size: tuple[int, int] = (256, 256)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request to be: pictures (encoded), then token ids, and the most tokens of the answer."""

    images: tuple[bytes, ...]
    token_ids: tuple[int, ...]
    output_len: int

    def request(self, *, model: str, ignore_eos: bool, temperature: float | None) -> router_pb2.GenerateRequest:
        """The request as the router takes it; a temperature of None is the checkpoint's own."""
        parts = [image_part(image) for image in self.images]
        parts.append(common_pb2.Part(token_ids=common_pb2.TokenIds(ids=self.token_ids)))
        sampling = common_pb2.SamplingParams(max_tokens=self.output_len, ignore_eos=ignore_eos, temperature=temperature)
        return completion_request(parts, model=model, sampling=sampling)


def plain_token_ids(tokenizer: Path, *, option: str = "--tokenizer") -> Sequence[int]:
    """Ids of the vocabulary in a folder with a tokenizer.json, added and control tokens left out. Raises BadDataset."""
    path = tokenizer / "tokenizer.json"
    try:
        document = json.loads(path.read_text())
        vocabulary = document["model"]["vocab"]
        added = {token["id"] for token in document.get("added_tokens", ())}
    except OSError as error:
        raise BadDataset(f"{option}: cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise BadDataset(f"{option}: {path} has no vocabulary") from None
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    plain = sorted(set(ids) - added)
    if not plain:
        raise BadDataset(f"{option}: {path} has control tokens only")
    return plain


def make_samples(shape: Shape, token_ids: Sequence[int], seed: int) -> list[Sample]:
    """The requests, the same ones for the same seed; `token_ids` are those to draw from. Raises BadDataset."""
    chance = random.Random(seed)
    input_lens = _bounds("--random-input-len", shape.input_len, shape.range_ratio)
    output_lens = _bounds("--random-output-len", shape.output_len, shape.range_ratio)
    prefix = chance.choices(token_ids, k=shape.prefix_len)
    samples = []
    for _ in range(shape.num_prompts):
        ids = prefix + chance.choices(token_ids, k=chance.randint(*input_lens))
        images = tuple(noise_image(chance, *shape.image_size) for _ in range(shape.images))
        samples.append(Sample(images, tuple(ids), chance.randint(*output_lens)))
    return samples


def noise_image(chance: random.Random, width: int, height: int) -> bytes:
    """PNG bytes of random pixels."""
    from PIL import Image

    out = io.BytesIO()
    Image.frombytes("RGB", (width, height), chance.randbytes(3 * width * height)).save(out, "PNG", compress_level=1)
    return out.getvalue()


def _bounds(option: str, length: int, ratio: float) -> tuple[int, int]:
    if not 0 <= ratio < 1:
        raise BadDataset(f"--random-range-ratio: at least 0 and below 1, got {ratio}")
    if length < 1:
        raise BadDataset(f"{option}: at least 1, got {length}")
    return max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))
