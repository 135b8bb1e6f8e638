"""Turns every image of a request into bytes, in place and within limits; knows no picture format.

A declared media type is never looked at: the service that decodes the bytes goes by their content.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from protos.common.v1 import common_pb2
from protos.router.v1 import router_pb2
from router_svc.fetch import Fetcher
from svc_common.errors import InvalidArgument, ResourceExhausted

# Decoding more than this on the event loop would be felt by other streams.
INLINE_BYTES = 64 * 1024
_WHITESPACE = b" \t\r\n\f\v"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Sizes of decoded pictures in bytes: one, and all of a request."""

    max_image_bytes: int
    max_total_image_bytes: int


def parts_of(request: router_pb2.GenerateRequest) -> Iterator[tuple[str, common_pb2.Part]]:
    """Every part in prompt order, with the path of its field for messages."""
    if request.WhichOneof("input") == "completion":
        for index, part in enumerate(request.completion.parts):
            yield f"completion.parts[{index}]", part
        return
    for turn, message in enumerate(request.chat.messages):
        for index, part in enumerate(message.parts):
            yield f"chat.messages[{turn}].parts[{index}]", part


async def resolve_images(request: router_pb2.GenerateRequest, limits: ImageLimits, fetcher: Fetcher) -> int:
    """Replaces URLs by the bytes they stand for and returns the bytes of all images together.

    Raises InvalidArgument or ResourceExhausted naming the image by its index in the request, from 0; what fetching
    raises passes through. Remote pictures are fetched at the same time; the first failure ends the others.
    """
    images = [part.image for _, part in parts_of(request) if part.WhichOneof("content") == "image"]
    total = _Total(limits.max_total_image_bytes)
    remote: list[tuple[int, common_pb2.Image]] = []
    for index, image in enumerate(images):
        source = image.WhichOneof("source")
        if source == "url":
            if not _is_data_url(image.url):
                remote.append((index, image))
                continue
            image.data = await _decode(image.url, index, limits)
        _check_size(image, index, limits)
        total.add(len(image.data))
    if remote:
        try:
            async with asyncio.TaskGroup() as group:
                fetches = [
                    group.create_task(fetcher.fetch(image.url, _name(image, index), total.add))
                    for index, image in remote
                ]
        except ExceptionGroup as failures:
            # One failure is enough to answer with; the group has ended the rest.
            raise failures.exceptions[0] from None
        for (index, image), fetch in zip(remote, fetches, strict=True):
            image.data = fetch.result()
            _check_size(image, index, limits)
    return total.size_bytes


@dataclass(slots=True)
class _Total:
    """Bytes of a request's images so far, checked while they grow."""

    limit_bytes: int
    size_bytes: int = 0

    def add(self, size_bytes: int) -> None:
        """Counts more bytes; ResourceExhausted once they are too many."""
        self.size_bytes += size_bytes
        if self.size_bytes > self.limit_bytes:
            value, limit = self.size_bytes, self.limit_bytes
            message = f"images hold {value} bytes together, more than max_total_image_bytes {limit}"
            raise ResourceExhausted(message, field="images", limit=limit, value=value, reason="TOTAL_IMAGE_BYTES")


def _name(image: common_pb2.Image, index: int) -> str:
    return f"images[{index}]" + (f" ({image.label[:80]!r})" if image.label else "")


def _check_size(image: common_pb2.Image, index: int, limits: ImageLimits) -> None:
    if not image.data:
        raise InvalidArgument(f"{_name(image, index)}: no data", field=f"images[{index}]", reason="IMAGE_EMPTY")
    if len(image.data) > limits.max_image_bytes:
        raise _too_large(_name(image, index), index, len(image.data), limits)


def _too_large(name: str, index: int, size_bytes: int, limits: ImageLimits) -> ResourceExhausted:
    limit = limits.max_image_bytes
    message = f"{name} holds {size_bytes} bytes, more than max_image_bytes {limit}"
    return ResourceExhausted(message, field=f"images[{index}]", limit=limit, value=size_bytes, reason="IMAGE_BYTES")


def _is_data_url(url: str) -> bool:
    return url.lstrip()[:5].lower() == "data:"


async def _decode(url: str, index: int, limits: ImageLimits) -> bytes:
    if len(url) <= INLINE_BYTES:
        return decode_data_url(url, index, limits)
    return await asyncio.to_thread(decode_data_url, url, index, limits)


def decode_data_url(url: str, index: int, limits: ImageLimits) -> bytes:
    """Bytes of a base64 data: URL (RFC 2397), read leniently where no other meaning is possible.

    Any media type and parameters, any letter case, white space anywhere in the data, missing padding, and both base64
    alphabets are accepted. Raises InvalidArgument for what is not base64 or is empty, ResourceExhausted before
    decoding what cannot fit; both name the image by `index`.
    """
    field = f"images[{index}]"
    header, comma, payload = url.strip().partition(",")
    if not comma:
        raise InvalidArgument(f"{field}: data: URL without a comma", field=field, reason="DATA_URL_COMMA")
    if header.rpartition(";")[2].strip().lower() != "base64" or ";" not in header:
        raise InvalidArgument(f"{field}: data: URL is not base64", field=field, reason="DATA_URL_NOT_BASE64")
    encoded = unquote_to_bytes(payload) if "%" in payload else payload.encode()
    encoded = encoded.translate(_URL_SAFE, _WHITESPACE)
    digits = encoded.rstrip(b"=")
    if not digits:
        raise InvalidArgument(f"{field}: data: URL without data", field=field, reason="IMAGE_EMPTY")
    size_bytes = len(digits) * 3 // 4
    if size_bytes > limits.max_image_bytes:
        raise _too_large(field, index, size_bytes, limits)
    try:
        if len(encoded) - len(digits) > 2:
            raise binascii.Error("too much padding")
        return base64.b64decode(digits + b"=" * (-len(digits) % 4), validate=True)
    except binascii.Error as error:
        message = f"{field}: data: URL holds bad base64 ({error})"
        raise InvalidArgument(message, field=field, reason="DATA_URL_NOT_BASE64") from error
