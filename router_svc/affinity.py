"""Says which replica a prompt would like, so that equal prefixes meet a warm cache; knows no load and no network.

A conversation keeps its key while it grows: the key of a chat covers its turns up to and including the first user turn,
the key of a completion covers its beginning. Images count by content, never by label.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from protos.common.v1 import common_pb2
from protos.llm.v1 import llm_pb2


def affinity_key(request: llm_pb2.GenerateRequest, prefix_bytes: int) -> bytes:
    """32-byte digest of the first `prefix_bytes` bytes of prompt text and of every image in the same turns.

    Images must be resolved to bytes. Requests with equal keys are likely to share cached blocks.
    """
    digest = hashlib.sha256()
    budget_bytes = prefix_bytes
    for role, parts in _leading_turns(request):
        digest.update(b"\x00turn" + str(role).encode())
        for part in parts:
            kind = part.WhichOneof("content")
            if kind == "image":
                digest.update(b"\x00image" + hashlib.sha256(part.image.data).digest())
                continue
            text = part.text[:budget_bytes] if kind == "text" else str(part.token_ids.ids[:budget_bytes])
            content = text.encode()[:budget_bytes]
            digest.update(content)
            budget_bytes -= len(content)
    return digest.digest()


def preferred_order(key: bytes, names: Iterable[str]) -> list[str]:
    """`names` from most to least preferred for `key`: rendezvous hashing (Thaler and Ravishankar, 1998).

    Adding or removing a name moves only the keys that prefer it.
    """
    return sorted(names, key=lambda name: (_weight(key, name), name), reverse=True)


def _weight(key: bytes, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), key=key, digest_size=8).digest()


def _leading_turns(request: llm_pb2.GenerateRequest) -> Iterable[tuple[int, Sequence[common_pb2.Part]]]:
    if request.WhichOneof("input") == "completion":
        yield common_pb2.ROLE_UNSPECIFIED, request.completion.parts
        return
    for message in request.chat.messages:
        yield message.role, message.parts
        if message.role == common_pb2.ROLE_USER:
            return
