"""Data URLs, their limits and their errors (case 10)."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.common.v1 import common_pb2
from router_svc.images import ImageLimits, decode_data_url
from svc_common.errors import InvalidArgument, ResourceExhausted, error_from_rpc

URLS = json.loads((Path(__file__).parents[1] / "data" / "data_urls.json").read_text())
REFUSED = {"empty", "no_comma", "not_base64"}
LIMITS = ImageLimits(max_image_bytes=10_000, max_total_image_bytes=20_000)
PICTURE = decode_data_url(URLS["charset"], 0, LIMITS)


def _image(**source):
    return common_pb2.Part(image=common_pb2.Image(**source))


async def _refusal(router, request):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.generate(request)
    return error_from_rpc(caught.value)


async def test_every_data_url_of_the_cases_ends_as_it_should(start_llm, start_router, chat):
    llm = await start_llm()
    router = await start_router(llm)
    for name, url in URLS.items():
        request = chat("see", b"fine", _image(url=url))
        if name in REFUSED:
            error = await _refusal(router, request)
            assert isinstance(error, InvalidArgument), name
            assert error.field == "images[1]" and "images[1]" in error.message, name
            continue
        await router.generate(request)
        data = llm.requests[-1].chat.messages[0].parts[2].image.data
        # wrong_type among them: what is declared is never looked at.
        assert data == PICTURE and data.startswith(b"\x89PNG"), name
    assert len(llm.requests) == len(URLS) - len(REFUSED)


@pytest.mark.parametrize(
    "url",
    [
        "data:;base64,AAEC",
        "data:image/png;name=a.png;charset=utf-8; base64 ,AAEC",
        "  data:image/png;base64,AA EC\n",
        "data:image/png;base64,\tAA%0AEC",
        "data:image/png;base64,%41AEC",
    ],
)
def test_other_spellings_are_read(url):
    assert decode_data_url(url, 0, LIMITS) == b"\x00\x01\x02"


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,   ",
        "data:image/png;base64,==",
        "data:image/png;base64,A",
        "data:image/png;base64,AA=A",
        "data:image/png;base64,AAAA===",
        "data:image/png;base64,AA!A",
        "data:image/png;base64,A\u00e9AA",
        "data:base64,AAEC",
        "data:,AAEC",
        "data:image/png;base64;x=y,AAEC",
    ],
)
def test_other_mistakes_are_refused(url):
    with pytest.raises(InvalidArgument, match=r"images\[3\]"):
        decode_data_url(url, 3, LIMITS)


@given(st.binary(min_size=1, max_size=200), st.booleans(), st.booleans())
def test_any_bytes_come_back(data, url_safe, padded):
    encoded = (base64.urlsafe_b64encode if url_safe else base64.b64encode)(data).decode()
    assert decode_data_url("data:image/png;base64," + (encoded if padded else encoded.rstrip("=")), 0, LIMITS) == data


def test_size_limit_is_exact_for_data_urls():
    at_limit, above = bytes(10_000), bytes(10_001)
    assert decode_data_url("data:;base64," + base64.b64encode(at_limit).decode(), 0, LIMITS) == at_limit
    with pytest.raises(ResourceExhausted, match=r"images\[0\].*10001.*max_image_bytes 10000"):
        decode_data_url("data:;base64," + base64.b64encode(above).decode(), 0, LIMITS)


async def test_sizes_of_one_and_of_all_pictures_are_limited(start_llm, start_router, chat):
    llm = await start_llm()
    router = await start_router(llm, max_image_bytes=1000, max_total_image_bytes=1500)
    encoded = base64.b64encode(bytes(1001)).decode()
    for part in (bytes(1001), _image(url="data:;base64," + encoded)):
        error = await _refusal(router, chat(b"ok", part))
        assert isinstance(error, ResourceExhausted)
        assert (error.field, error.limit, error.value) == ("images[1]", "1000", "1001")
    error = await _refusal(router, chat(bytes(800), bytes(701)))
    assert isinstance(error, ResourceExhausted)
    assert (error.field, error.limit, error.value) == ("images", "1500", "1501")
    assert await router.text(chat(bytes(800), bytes(700))) == "from a"
    assert len(llm.requests) == 1


async def test_a_picture_without_data_is_refused_by_index_and_label(start_llm, start_router, chat):
    llm = await start_llm()
    router = await start_router(llm)
    for part in (_image(label="cat.png"), _image(data=b"", label="cat.png"), _image(url="", label="cat.png")):
        error = await _refusal(router, chat(b"ok", part))
        assert isinstance(error, InvalidArgument)
        assert "images[1]" in error.message
    assert not llm.requests


async def test_large_data_urls_leave_the_loop_free(start_llm, start_router, chat):
    llm = await start_llm()
    router = await start_router(llm)
    picture = bytes(range(256)) * 8192
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    await asyncio.gather(*(router.generate(chat(_image(url=url))) for _ in range(4)))
    assert all(request.chat.messages[0].parts[0].image.data == picture for request in llm.requests)
