"""Remote pictures (case 11): off by default, and never a door to the inside."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import grpc
import pytest

from protos.common.v1 import common_pb2
from router_svc.fetch import FetchPolicy
from svc_common.errors import InvalidArgument, ResourceExhausted, Unavailable, error_from_rpc

LOOPBACK = ("127.0.0.0/8",)


def _remote(url):
    return common_pb2.Part(image=common_pb2.Image(url=url))


async def _refusal(router, request):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.generate(request)
    return error_from_rpc(caught.value)


async def test_off_by_default_and_nothing_is_connected_to(start_llm, start_router, start_web, chat):
    llm, web = await start_llm(), await start_web()
    router = await start_router(llm)
    error = await _refusal(router, chat(b"ok", _remote(f"http://127.0.0.1:{web.port}/secret.png")))
    assert isinstance(error, InvalidArgument) and error.reason == "FETCH_OFF"
    assert "images[1]" in error.message and "fetch_allowed_hosts" in error.message
    assert "secret" not in error.message
    assert not web.asked and not llm.requests


async def test_allowed_host_is_fetched_in_prompt_order(start_llm, start_router, start_web, chat):
    llm, web = await start_llm(), await start_web()
    web.body("/red.png?size=2", b"red")
    web.body("/moved", b"", "301 Moved Permanently", "Location: /blue.png")
    web.body("/blue.png", b"blue")
    router = await start_router(llm, fetch_allowed_hosts=(f"localhost:{web.port}",), fetch_allowed_networks=LOOPBACK)
    base = f"http://LOCALHOST:{web.port}"
    await router.generate(chat("first:", _remote(f"{base}/red.png?size=2#top"), "second:", _remote(f"{base}/moved")))
    parts = llm.requests[0].chat.messages[0].parts
    assert [part.text or part.image.data for part in parts] == ["first:", b"red", "second:", b"blue"]
    assert {host for _, host in web.asked} == {f"localhost:{web.port}"}


@pytest.mark.parametrize("path", ["other-port", "file", "metadata", "userinfo", "other-name"])
async def test_every_redirect_hop_is_checked(start_llm, start_router, start_web, chat, path):
    llm, web, inside = await start_llm(), await start_web(), await start_web()
    inside.body("/", b"secret")
    web.redirect("/other-port", f"http://127.0.0.1:{inside.port}/")
    web.redirect("/file", "file:///etc/passwd")
    web.redirect("/metadata", "http://169.254.169.254/latest/meta-data/")
    web.redirect("/userinfo", f"http://127.0.0.1:{web.port}@127.0.0.1:{inside.port}/")
    web.redirect("/other-name", f"//localhost:{inside.port}/")
    hosts = (f"127.0.0.1:{web.port}", "169.254.169.254")
    router = await start_router(llm, fetch_allowed_hosts=hosts, fetch_allowed_networks=LOOPBACK)
    error = await _refusal(router, chat(_remote(f"http://127.0.0.1:{web.port}/{path}")))
    assert isinstance(error, InvalidArgument) and "images[0]" in error.message
    assert web.asked == [(f"/{path}", f"127.0.0.1:{web.port}")]
    assert not inside.asked and not llm.requests


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "FILE:///etc/passwd", "ftp://host/a.png", "gopher://x", "a.png", ""]
)
@pytest.mark.parametrize("hosts", [(), ("host",)])
async def test_only_http_and_data_are_schemes(start_llm, start_router, chat, url, hosts):
    llm = await start_llm()
    router = await start_router(llm, fetch_allowed_hosts=hosts)
    error = await _refusal(router, chat(_remote(url)))
    assert isinstance(error, InvalidArgument) and "images[0]" in error.message
    assert error.reason == "FETCH_SCHEME"


@pytest.mark.parametrize(
    "form", ["user:hunter2@{}", "hunter2@{}", "{}/\u00e9hunter2", "{}/a hunter2", "[hunter2", "{}/\nhunter2"]
)
async def test_doubtful_urls_are_refused_without_being_quoted(start_llm, start_router, start_web, chat, form):
    llm, web = await start_llm(), await start_web()
    host = f"127.0.0.1:{web.port}"
    router = await start_router(llm, fetch_allowed_hosts=(host,), fetch_allowed_networks=LOOPBACK)
    error = await _refusal(router, chat(_remote("http://" + form.format(host))))
    assert isinstance(error, InvalidArgument) and error.reason == "FETCH_URL"
    assert "images[0]" in error.message and "hunter2" not in error.message
    assert not web.asked


async def test_an_allowed_name_with_a_private_address_is_refused(start_llm, start_router, start_web, chat):
    llm, web = await start_llm(), await start_web()
    web.body("/", b"secret")
    router = await start_router(llm, fetch_allowed_hosts=(f"localhost:{web.port}", "169.254.169.254", "*.internal"))
    for url in (f"http://localhost:{web.port}/", "http://169.254.169.254/", "http://169.254.169.254:80/"):
        error = await _refusal(router, chat(_remote(url)))
        assert isinstance(error, InvalidArgument) and error.reason == "FETCH_ADDRESS_REFUSED"
    assert not web.asked and web.open_connections == 0


async def test_the_connection_goes_to_the_address_that_was_checked(
    start_llm, start_router, start_web, chat, monkeypatch
):
    llm, web = await start_llm(), await start_web()
    web.body("/", b"picture")
    router = await start_router(
        llm, fetch_allowed_hosts=(f"pictures.test:{web.port}",), fetch_allowed_networks=("127.0.0.1/32",)
    )
    genuine, answers = socket.getaddrinfo, ["127.0.0.1", "127.0.0.2"]

    def rebinding(host, port, *args, **options):
        # A name whose owner changes its address between two look-ups.
        return genuine(answers.pop(0) if host == "pictures.test" else host, port, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    await router.generate(chat(_remote(f"http://pictures.test:{web.port}/")))
    assert llm.requests[0].chat.messages[0].parts[0].image.data == b"picture"
    assert web.asked == [("/", f"pictures.test:{web.port}")]
    assert answers == ["127.0.0.2"], "one look-up, and its answer is the one connected to"
    error = await _refusal(router, chat(_remote(f"http://pictures.test:{web.port}/")))
    assert error.reason == "FETCH_ADDRESS_REFUSED"


async def test_bytes_time_redirects_and_statuses_are_limited(start_llm, start_router, start_web, chat, until):
    llm, web = await start_llm(), await start_web()
    web.redirect("/loop", "/loop")
    web.body("/missing", b"", "404 Not Found")
    web.body("/broken", b"", "503 Service Unavailable")
    web.body("/packed", b"x", "200 OK", "Content-Encoding: gzip")
    web.body("/large", bytes(1001))
    web.body("/full", bytes(1000))
    web.body("/empty", b"")
    web.answers["/cut"] = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort"
    web.answers["/nonsense"] = b"SSH-2.0-OpenSSH\r\n\r\n"
    router = await start_router(
        llm,
        fetch_allowed_hosts=(f"127.0.0.1:{web.port}", "127.0.0.1:9", "*.nowhere.invalid"),
        fetch_allowed_networks=LOOPBACK,
        fetch_timeout_seconds=0.5,
        fetch_max_redirects=2,
        max_image_bytes=1000,
        max_total_image_bytes=1500,
    )

    async def refusal(*urls):
        error = await _refusal(router, chat(*(_remote(f"http://127.0.0.1:{web.port}{url}") for url in urls)))
        return type(error), error.reason

    assert await refusal("/loop") == (InvalidArgument, "FETCH_REDIRECTS")
    assert len(web.asked) == 3
    assert await refusal("/missing") == (InvalidArgument, "FETCH_STATUS")
    assert await refusal("/broken") == (Unavailable, "FETCH_STATUS")
    assert await refusal("/packed") == (InvalidArgument, "FETCH_ENCODING")
    assert await refusal("/large") == (ResourceExhausted, "IMAGE_BYTES")
    assert await refusal("/empty") == (InvalidArgument, "IMAGE_EMPTY")
    assert await refusal("/full", "/full") == (ResourceExhausted, "TOTAL_IMAGE_BYTES")
    assert await refusal("/cut") == (Unavailable, "FETCH_FAILED")
    assert await refusal("/nonsense") == (Unavailable, "FETCH_FAILED")
    assert await refusal("/silent") == (Unavailable, "FETCH_TIMEOUT")
    for url in ("http://127.0.0.1:9/", "http://a..nowhere.invalid/"):
        error = await _refusal(router, chat(_remote(url)))
        assert error.reason == "FETCH_FAILED"
    web.endless = b"x"
    web.answers["/drip"] = b"HTTP/1.1 200 OK\r\n\r\n"
    assert await refusal("/drip") == (Unavailable, "FETCH_TIMEOUT")
    await until(lambda: web.open_connections == 0)
    assert not llm.requests


async def test_an_endless_body_is_cut_off_at_the_limit_of_one_picture(start_llm, start_router, start_web, chat, until):
    llm, web = await start_llm(), await start_web()
    web.endless = bytes(64 * 1024)
    web.answers["/"] = b"HTTP/1.1 200 OK\r\n\r\n"
    router = await start_router(
        llm,
        fetch_allowed_hosts=(f"127.0.0.1:{web.port}",),
        fetch_allowed_networks=LOOPBACK,
        max_image_bytes=1024 * 1024,
    )
    error = await _refusal(router, chat(_remote(f"http://127.0.0.1:{web.port}/")))
    assert isinstance(error, ResourceExhausted)
    assert (error.reason, error.limit) == ("IMAGE_BYTES", str(1024 * 1024))
    await until(lambda: web.open_connections == 0)


async def test_cancel_ends_a_fetch(start_llm, start_router, start_web, chat, until):
    llm, web = await start_llm(), await start_web()
    router = await start_router(llm, fetch_allowed_hosts=(f"127.0.0.1:{web.port}",), fetch_allowed_networks=LOOPBACK)
    call = router.stub.Generate(chat(_remote(f"http://127.0.0.1:{web.port}/silent")))
    reading = asyncio.create_task(call.read())
    await until(lambda: web.open_connections == 1)
    call.cancel()
    await until(lambda: web.open_connections == 0)
    with pytest.raises(asyncio.CancelledError):
        await reading
    await until(lambda: router.metric("num_requests_waiting") == 0)


def _policy(hosts=(), networks=()):
    networks = tuple(ipaddress.ip_network(text) for text in networks)
    return FetchPolicy(hosts, networks, max_bytes=1, max_redirects=0, timeout_seconds=1, max_connections=1)


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("100.100.100.200", False),
        ("169.254.169.254", False),
        ("168.63.129.16", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fd00:ec2::254", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:169.254.169.254", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("2002:7f00:1::", False),
        ("::127.0.0.1", False),
    ],
)
def test_only_public_addresses_are_connected_to(address, allowed):
    assert _policy().allows_address(ipaddress.ip_address(address)) is allowed


def test_a_configured_network_is_permitted_also_in_its_ipv6_form():
    policy = _policy(networks=("10.1.0.0/16",))
    for address, allowed in (("10.1.2.3", True), ("::ffff:10.1.2.3", True), ("10.2.0.1", False), ("127.0.0.1", False)):
        assert policy.allows_address(ipaddress.ip_address(address)) is allowed


@pytest.mark.parametrize(
    ("entry", "host", "port", "allowed"),
    [
        ("pictures.test", "pictures.test", 443, True),
        ("pictures.test", "pictures.test", 80, True),
        ("pictures.test", "pictures.test", 8080, False),
        ("Pictures.Test:8080", "pictures.test", 8080, True),
        ("pictures.test:8080", "pictures.test", 80, False),
        ("*.pictures.test", "a.pictures.test", 443, True),
        ("*.pictures.test", "pictures.test", 443, False),
        ("*.pictures.test", "evilpictures.test", 443, False),
        ("pictures.test", "a.pictures.test", 443, False),
        ("pictures.test", "pictures.test.evil.test", 443, False),
        ("[fd00::1]", "fd00::1", 443, True),
        ("[fd00::1]:8080", "fd00::1", 8080, True),
        ("[fd00::1]:8080", "fd00::1", 443, False),
    ],
)
def test_the_list_of_hosts(entry, host, port, allowed):
    assert _policy((entry,)).allows_host(host, port) is allowed
