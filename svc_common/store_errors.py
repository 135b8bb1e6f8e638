"""What can go wrong between us and an object store, one class for each cause; knows how obstore words its errors."""

from __future__ import annotations

import re
from typing import ClassVar


class StoreError(Exception):
    """An object store did not do what it was asked; the message names the place, the file and the cause.

    Never more of the store's answer than its status and error code: the rest can hold tokens.
    """

    cause: ClassVar[str] = "the store failed"
    retried: ClassVar[bool] = False

    def __init__(self, uri: str, file: str, detail: str = "") -> None:
        self.uri = uri
        self.file = file
        self.detail = detail
        self.attempts = 1
        super().__init__(uri, file, detail)

    def __str__(self) -> str:
        place = f"{self.file} in {self.uri}" if self.file else self.uri
        detail = f": {self.detail}" if self.detail else ""
        tries = f" (tried {self.attempts} times)" if self.attempts > 1 else ""
        return f"{place}: {self.cause}{detail}{tries}"


class UnsupportedUri(StoreError):
    """The URI is none we can read."""

    cause = "the URI is not supported"


class ObjectMissing(StoreError):
    """404, or no such local file or folder."""

    cause = "it does not exist"


class AccessDenied(StoreError):
    """403, or a local file we may not read."""

    cause = "access is denied"


class CredentialsMissing(StoreError):
    """Nothing configured, and no metadata service gave any."""

    cause = "no credentials were found"


class CredentialsExpired(StoreError):
    """ExpiredToken or 401, and again after one refresh."""

    cause = "the credentials have expired or are not accepted, and refreshing them did not help"


class Throttled(StoreError):
    """503, SlowDown or 429."""

    cause = "the store is throttling"
    retried = True


class ServerFault(StoreError):
    """Another 5xx."""

    cause = "the store has an internal fault"
    retried = True


class BodyCut(StoreError):
    """The connection ended before the body did."""

    cause = "the body was cut off"
    retried = True


class ShortRange(StoreError):
    """A partial answer that holds another range than was asked for."""

    cause = "the partial answer has the wrong length or range"
    retried = True


class RangeIgnored(StoreError):
    """The whole object, or a partial answer that does not say its range, in place of the range."""

    cause = "the store ignored the range of the request"


class VersionChanged(StoreError):
    """Another ETag, size or version than the listing had: somebody replaced the file."""

    cause = "the file changed while it was being read"


class TlsFault(StoreError):
    """No trusted encrypted connection."""

    cause = "the TLS connection failed"


class PlainHttpRefused(StoreError):
    """The endpoint begins with http:// and nothing allows that."""

    cause = "plain HTTP is not allowed; AWS_ALLOW_HTTP=true allows it"


class Unreachable(StoreError):
    """Refused, reset, timed out, or a name that does not resolve."""

    cause = "the store cannot be reached"
    retried = True


_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_TLS_WORDS = ("InvalidCertificate", "UnknownIssuer", "InvalidContentType", "AlertReceived", "tls handshake")
_METADATA_SERVICES = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
_EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}


def to_store_error(exc: Exception, uri: str, file: str) -> StoreError:
    """The cause behind an exception of obstore; obstore has one class for most, so its text decides."""
    if isinstance(exc, StoreError):
        return exc
    text = str(exc)
    code_match, status_match = _CODE.search(text), _STATUS.search(text)
    code = code_match.group(1) if code_match else ""
    status = int(status_match.group(1)) if status_match else 0
    answer = " ".join(part for part in (str(status) if status else "", code) if part)
    return _class_of(exc, text, status, code)(uri, file, answer or _first_line(text))


def _class_of(exc: Exception, text: str, status: int, code: str) -> type[StoreError]:
    if any(host in text for host in _METADATA_SERVICES):
        return CredentialsMissing
    if code in _EXPIRED_CODES or status == 401:
        return CredentialsExpired
    if code == "SlowDown" or status in (429, 503):
        return Throttled
    if status >= 500:
        return ServerFault
    if status == 412 or type(exc).__name__ == "PreconditionError":
        return VersionChanged
    if status == 404 or isinstance(exc, FileNotFoundError):
        return ObjectMissing
    if status == 403 or isinstance(exc, PermissionError) or "PermissionDenied" in text:
        return AccessDenied
    return _class_of_transport(text)


def _class_of_transport(text: str) -> type[StoreError]:
    if "UnexpectedRange" in text:
        return ShortRange
    if "NotPartial" in text or "NoContentRange" in text:
        return RangeIgnored
    if "BadScheme" in text:
        return PlainHttpRefused
    if any(word in text for word in _TLS_WORDS):
        return TlsFault
    if "response body error" in text or "kind: Interrupted" in text or "IncompleteBody" in text:
        return BodyCut
    if "HttpError" in text:
        return Unreachable
    return StoreError


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0][:200]
