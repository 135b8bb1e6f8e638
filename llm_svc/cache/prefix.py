"""Names the content of full blocks: a hash chain over token ids and the digests of the images inside."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from struct import pack

from llm_svc.core import Prompt, Sequence


def block_keys(sequence: Sequence, block_size: int, up_to: int) -> Iterator[bytes]:
    """Keys of the sequence's first `up_to` full blocks, in order; each depends on all before it.

    A placeholder run contributes the image's digest and how far into the image the block starts, since the ids of all
    placeholders are the same.
    """
    parent = sequence.block_keys[-1] if sequence.block_keys else b"day0"
    for index in range(len(sequence.block_keys), up_to):
        start, end = index * block_size, (index + 1) * block_size
        ids = sequence.token_ids(start, end)
        assert len(ids) == block_size
        digest = hashlib.sha256(parent)
        digest.update(pack(f"<{block_size}q", *ids))
        digest.update(_images(sequence.prompt, start, end))
        parent = digest.digest()
        yield parent


def _images(prompt: Prompt, start: int, end: int) -> bytes:
    parts = [
        pack("<qq", span.start - start, len(span.visual.digest)) + span.visual.digest
        for span in prompt.images
        if span.start < end and span.end > start
    ]
    return b"".join(parts)


def extend_keys(sequence: Sequence, block_size: int, up_to: int) -> None:
    """Completes `sequence.block_keys` to the first `up_to` blocks."""
    sequence.block_keys.extend(block_keys(sequence, block_size, up_to))
