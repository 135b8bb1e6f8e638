"""Which addresses a Kubernetes target stands for, from a server that speaks the cluster's API on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from svc_common.addresses import AddressWatch
from svc_common.endpoint_slices import ClusterAccess
from svc_common.targets import Target
from tests.cluster_api import TOKEN, ClusterApi, endpoint_slice

TARGET = Target.parse("kubernetes:///llm.day0:50051")


class Watched:
    """What a watch told last; `until` waits for a set of addresses."""

    def __init__(self) -> None:
        self.listed: frozenset[str] = frozenset()
        self._news = asyncio.Event()

    def __call__(self, listed: frozenset[str]) -> None:
        self.listed = listed
        self._news.set()

    async def until(self, *addresses: str) -> None:
        async with asyncio.timeout(20):
            while self.listed != {f"{address}:50051" for address in addresses}:
                self._news.clear()
                await self._news.wait()


@pytest.fixture
def api(request: pytest.FixtureRequest) -> AsyncIterator[ClusterApi]:
    api = ClusterApi(versions=getattr(request, "param", ("v1",)))
    api.put(endpoint_slice("llm-a", "10.0.0.1", port=50051))
    yield api
    api.close()


@pytest.fixture
async def follow(api: ClusterApi, tmp_path: Path) -> AsyncIterator[Callable[..., Watched]]:
    (tmp_path / "token").write_text(TOKEN + "\n")
    watches: list[AddressWatch] = []

    async def start(target: Target = TARGET) -> Watched:
        watched = Watched()
        access = ClusterAccess(api.url, tmp_path / "token", tmp_path / "ca.crt")
        watches.append(AddressWatch([target], access, 0.05, watched))
        await watches[-1].start()
        return watched

    yield start
    for watch in watches:
        await watch.stop()


async def test_endpoints_are_followed(api: ClusterApi, follow: Callable[..., Watched]) -> None:
    watched = await follow()
    await watched.until("10.0.0.1")
    # A Service of many pods has several slices; one that is not ready is listed, its health is asked by who follows.
    api.put(endpoint_slice("llm-b", "10.0.0.2", "10.0.0.3", port=50051))
    await watched.until("10.0.0.1", "10.0.0.2", "10.0.0.3")
    api.put(endpoint_slice("llm-b", "10.0.0.2", "10.0.0.3", port=50051, terminating=("10.0.0.3",)))
    await watched.until("10.0.0.1", "10.0.0.2")
    api.delete("llm-a")
    await watched.until("10.0.0.2")
    api.put(endpoint_slice("llm-c", "10.0.0.9", port=8000))
    api.put(endpoint_slice("llm-b", port=50051))
    await watched.until()
    assert api.lists == 1


async def test_a_watch_that_ends_goes_on_where_it_was(api: ClusterApi, follow: Callable[..., Watched]) -> None:
    watched = await follow()
    await watched.until("10.0.0.1")
    for number in range(2, 5):
        api.end_watches()
        api.put(endpoint_slice(f"llm-{number}", f"10.0.0.{number}", port=50051))
        await watched.until(*(f"10.0.0.{index}" for index in range(1, number + 1)))
    assert api.lists == 1
    assert api.watched_from == sorted(api.watched_from) and api.watched_from[-1] > api.watched_from[0]


async def test_a_renewed_token_is_taken_up_with_the_next_watch(
    api: ClusterApi, follow: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = await follow()
    await watched.until("10.0.0.1")
    # The watch is open once something comes through it.
    api.put(endpoint_slice("llm-a", "10.0.0.2", port=50051))
    await watched.until("10.0.0.2")
    (tmp_path / "token").write_text("renewed")
    api.token = "renewed"
    api.end_watches()
    api.put(endpoint_slice("llm-a", "10.0.0.5", port=50051))
    await watched.until("10.0.0.5")
    assert api.lists == 1


async def test_a_version_that_is_gone_is_listed_anew(api: ClusterApi, follow: Callable[..., Watched]) -> None:
    watched = await follow()
    await watched.until("10.0.0.1")
    api.put(endpoint_slice("llm-a", "10.0.0.1", "10.0.0.2", port=50051))
    await watched.until("10.0.0.1", "10.0.0.2")
    api.expire()
    api.put(endpoint_slice("llm-a", "10.0.0.7", port=50051))
    await watched.until("10.0.0.7")
    assert api.lists == 2


@pytest.mark.parametrize("api", [("v1beta1",)], indirect=True)
async def test_an_old_cluster_has_the_older_version(follow: Callable[..., Watched]) -> None:
    await (await follow()).until("10.0.0.1")


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_without_permission_the_name_is_resolved(
    api: ClusterApi, follow: Callable[..., Watched], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.status = status

    async def resolved(target: Target) -> frozenset[str]:
        assert target.dns_name == "llm.day0.svc"
        return frozenset({"10.9.9.9:50051"})

    monkeypatch.setattr("svc_common.addresses.resolve", resolved)
    await (await follow()).until("10.9.9.9")


async def test_a_server_out_of_order_keeps_what_is_known(
    api: ClusterApi, follow: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("svc_common.endpoint_slices._RETRY_SECONDS", 0.05)
    watched = await follow()
    await watched.until("10.0.0.1")
    api.status = 500
    api.expire()
    api.put(endpoint_slice("llm-b", "10.0.0.2", port=50051))
    async with asyncio.timeout(20):
        while api.refusals < 2:
            await asyncio.sleep(0.01)
    assert watched.listed == {"10.0.0.1:50051"}
    api.status = 200
    await watched.until("10.0.0.1", "10.0.0.2")
