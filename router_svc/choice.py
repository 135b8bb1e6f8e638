"""Chooses one request's replica among the ready ones: the preferred one unless it is busier; knows no network."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from router_svc.affinity import preferred_order


class Loaded(Protocol):
    """What the choice needs to know about a replica."""

    @property
    def name(self) -> str:
        """Its address; stable, so that hashing is."""

    @property
    def open_requests(self) -> int:
        """Requests waiting or running there, as far as known."""

    @property
    def queued_tokens(self) -> int:
        """Token-work waiting there when last asked."""


ReplicaT = TypeVar("ReplicaT", bound=Loaded)


def choose(replicas: Sequence[ReplicaT], key: bytes, *, extra_requests: int, extra_tokens: int) -> ReplicaT:
    """The replica `key` prefers among those that are not far above the least loaded one.

    Far is more than `extra_requests` open requests or more than `extra_tokens` waiting token-work above the least of
    each. This is consistent hashing with bounded loads: a popular prefix spills over to its next preferences. With
    `extra_requests` 0 it is plain least load: fewest requests, then least token-work, then chance.
    """
    assert replicas, "the caller has refused a request that no replica can take"
    least_requests = min(replica.open_requests for replica in replicas)
    least_tokens = min(replica.queued_tokens for replica in replicas)
    near = {
        replica.name: replica
        for replica in replicas
        if replica.open_requests <= least_requests + extra_requests
        and replica.queued_tokens <= least_tokens + extra_tokens
    }
    if near and extra_requests:
        return near[preferred_order(key, near)[0]]
    fewest = min((replica.open_requests, replica.queued_tokens) for replica in replicas)
    return random.choice([replica for replica in replicas if (replica.open_requests, replica.queued_tokens) == fewest])
