"""The cache keeps its byte budget and forgets the least recently used image first."""

from __future__ import annotations

from vision_svc.cache import TokenCache
from vision_svc.encoder import VisualTokens


def tokens(size_bytes: int) -> VisualTokens:
    return VisualTokens(bytes(size_bytes), 1, size_bytes // 4, 2, 2, b"")


def test_least_recently_used_goes_first() -> None:
    cache = TokenCache(300)
    for name in (b"a", b"b", b"c"):
        cache.put(name, tokens(100))
    assert cache.get(b"a") is not None
    cache.put(b"d", tokens(100))
    assert cache.get(b"b") is None
    assert all(cache.get(name) is not None for name in (b"a", b"c", b"d"))
    assert (cache.images, cache.held_bytes) == (3, 300)


def test_one_large_image_pushes_out_several() -> None:
    cache = TokenCache(300)
    for name in (b"a", b"b", b"c"):
        cache.put(name, tokens(100))
    cache.put(b"d", tokens(250))
    assert (cache.images, cache.held_bytes) == (1, 250)


def test_image_above_the_budget_is_not_kept_and_pushes_nothing_out() -> None:
    cache = TokenCache(300)
    cache.put(b"a", tokens(100))
    cache.put(b"b", tokens(301))
    assert cache.get(b"a") is not None and cache.get(b"b") is None
    assert cache.held_bytes == 100


def test_same_digest_counts_once() -> None:
    cache = TokenCache(300)
    cache.put(b"a", tokens(100))
    cache.put(b"a", tokens(100))
    assert (cache.images, cache.held_bytes) == (1, 100)


def test_no_budget_keeps_nothing() -> None:
    cache = TokenCache(0)
    cache.put(b"a", tokens(4))
    assert cache.images == 0
