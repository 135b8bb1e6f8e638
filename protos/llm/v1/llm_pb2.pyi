from protos.common.v1 import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("model", "chat", "completion", "sampling")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    model: str
    chat: _common_pb2.Chat
    completion: _common_pb2.Completion
    sampling: _common_pb2.SamplingParams
    def __init__(self, model: _Optional[str] = ..., chat: _Optional[_Union[_common_pb2.Chat, _Mapping]] = ..., completion: _Optional[_Union[_common_pb2.Completion, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("accepted", "delta", "finished", "usage")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    accepted: _common_pb2.Accepted
    delta: _common_pb2.Delta
    finished: _common_pb2.ChoiceFinished
    usage: _common_pb2.Usage
    def __init__(self, accepted: _Optional[_Union[_common_pb2.Accepted, _Mapping]] = ..., delta: _Optional[_Union[_common_pb2.Delta, _Mapping]] = ..., finished: _Optional[_Union[_common_pb2.ChoiceFinished, _Mapping]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("queued_tokens", "waiting_requests", "running_sequences", "free_blocks", "total_blocks", "free_state_slots", "total_state_slots", "visual_entries", "open_streams", "max_running_sequences")
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_STATE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STATE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    VISUAL_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    OPEN_STREAMS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    queued_tokens: int
    waiting_requests: int
    running_sequences: int
    free_blocks: int
    total_blocks: int
    free_state_slots: int
    total_state_slots: int
    visual_entries: int
    open_streams: int
    max_running_sequences: int
    def __init__(self, queued_tokens: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., running_sequences: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_state_slots: _Optional[int] = ..., total_state_slots: _Optional[int] = ..., visual_entries: _Optional[int] = ..., open_streams: _Optional[int] = ..., max_running_sequences: _Optional[int] = ...) -> None: ...
