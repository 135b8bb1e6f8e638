from protos.common.v1 import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EncodeRequest(_message.Message):
    __slots__ = ("data", "label")
    DATA_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    label: str
    def __init__(self, data: _Optional[bytes] = ..., label: _Optional[str] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("header", "chunk", "trailer")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    header: VisualHeader
    chunk: VisualChunk
    trailer: VisualTrailer
    def __init__(self, header: _Optional[_Union[VisualHeader, _Mapping]] = ..., chunk: _Optional[_Union[VisualChunk, _Mapping]] = ..., trailer: _Optional[_Union[VisualTrailer, _Mapping]] = ...) -> None: ...

class VisualHeader(_message.Message):
    __slots__ = ("tokens", "grid_frames", "grid_height", "grid_width", "hidden", "dtype", "digest")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRID_FRAMES_FIELD_NUMBER: _ClassVar[int]
    GRID_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    GRID_WIDTH_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    grid_frames: int
    grid_height: int
    grid_width: int
    hidden: int
    dtype: _common_pb2.DType
    digest: bytes
    def __init__(self, tokens: _Optional[int] = ..., grid_frames: _Optional[int] = ..., grid_height: _Optional[int] = ..., grid_width: _Optional[int] = ..., hidden: _Optional[int] = ..., dtype: _Optional[_Union[_common_pb2.DType, str]] = ..., digest: _Optional[bytes] = ...) -> None: ...

class VisualChunk(_message.Message):
    __slots__ = ("offset", "count", "data", "crc32c")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    offset: int
    count: int
    data: bytes
    crc32c: int
    def __init__(self, offset: _Optional[int] = ..., count: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32c: _Optional[int] = ...) -> None: ...

class VisualTrailer(_message.Message):
    __slots__ = ("tokens", "bytes", "sha256", "cached")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    bytes: int
    sha256: bytes
    cached: bool
    def __init__(self, tokens: _Optional[int] = ..., bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ..., cached: _Optional[bool] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("info", "startup")
    INFO_FIELD_NUMBER: _ClassVar[int]
    STARTUP_FIELD_NUMBER: _ClassVar[int]
    info: _common_pb2.ModelInfo
    startup: _common_pb2.StartupProgress
    def __init__(self, info: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., startup: _Optional[_Union[_common_pb2.StartupProgress, _Mapping]] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("waiting_images", "running_images", "cached_images", "cached_bytes", "open_streams", "waiting_patches")
    WAITING_IMAGES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_IMAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_IMAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPEN_STREAMS_FIELD_NUMBER: _ClassVar[int]
    WAITING_PATCHES_FIELD_NUMBER: _ClassVar[int]
    waiting_images: int
    running_images: int
    cached_images: int
    cached_bytes: int
    open_streams: int
    waiting_patches: int
    def __init__(self, waiting_images: _Optional[int] = ..., running_images: _Optional[int] = ..., cached_images: _Optional[int] = ..., cached_bytes: _Optional[int] = ..., open_streams: _Optional[int] = ..., waiting_patches: _Optional[int] = ...) -> None: ...
