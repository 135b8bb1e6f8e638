"""Prompts: messages or raw parts to runs of token ids with the images' places between them; knows no gRPC, no engine.

The chat template is the checkpoint's own and is never taken from a request.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_svc.chat_template import ChatTemplate, TemplateError, TemplateRefused, TemplateTooSlow
from llm_svc.core import PromptImage, PromptSegment, PromptTokens
from llm_svc.disguise import TextNotEncodable
from llm_svc.prompt_parts import ChatMessage, ImagePart, PromptPart, TextPart, TokenIdsPart
from llm_svc.text_encoder import TextEncoder
from svc_common.errors import InvalidArgument, ResourceExhausted

log = logging.getLogger(__name__)


class PromptBuilder:
    """Builds prompts for one checkpoint. `tokenizer` is a Hugging Face fast tokenizer.

    A token id outside `[0, vocab_size)`, or one of `image_token_id` and `placeholder_ids`, is refused in a request.
    `template_seconds` is the processor time one rendering may take. Raises ValueError for a tokenizer that is not
    supported; the methods raise InvalidArgument or ResourceExhausted.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None,
        vocab_size: int,
        image_token_id: int | None = None,
        image_start_token_id: int | None = None,
        image_end_token_id: int | None = None,
        placeholder_ids: frozenset[int] = frozenset(),
        template_seconds: float = 2.0,
    ) -> None:
        self._vocab_size = vocab_size
        self._image_token_id = image_token_id
        self._image_start = () if image_start_token_id is None else (image_start_token_id,)
        self._image_end = () if image_end_token_id is None else (image_end_token_id,)
        self._placeholder_ids = placeholder_ids | ({image_token_id} if image_token_id is not None else set())
        self._encoder = TextEncoder(tokenizer, template=chat_template or "", never_searched=self._placeholder_ids)
        self._template: ChatTemplate | None = None
        self._takes_strings: bool | None = None
        self._takes_parts: bool | None = None
        if chat_template is not None:
            variables = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
            self._template = ChatTemplate(chat_template, limit_seconds=template_seconds, variables=variables)

    @classmethod
    def from_checkpoint(cls, path: str | Path, *, template_seconds: float = 2.0) -> PromptBuilder:
        """Reads tokenizer, template and configuration of a checkpoint folder."""
        from transformers import AutoConfig, AutoTokenizer

        config = AutoConfig.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
        video_token_id = getattr(config, "video_token_id", None)
        builder = cls(
            tokenizer,
            chat_template=read_chat_template(tokenizer, Path(path)),
            vocab_size=config.get_text_config().vocab_size,
            image_token_id=getattr(config, "image_token_id", None),
            image_start_token_id=getattr(config, "image_start_token_id", None),
            image_end_token_id=getattr(config, "image_end_token_id", None),
            placeholder_ids=frozenset() if video_token_id is None else frozenset({video_token_id}),
            template_seconds=template_seconds,
        )
        # Starts the template's process now rather than in the first request.
        builder._probe()
        return builder

    @property
    def takes_images(self) -> bool:
        """Whether the checkpoint has a placeholder for images."""
        return self._image_token_id is not None

    def close(self) -> None:
        """Ends the template's child process."""
        if self._template is not None:
            self._template.close()

    def build_chat(self, messages: Sequence[ChatMessage]) -> tuple[PromptSegment, ...]:
        """Renders `messages` through the chat template, with the opening of the answer at the end."""
        if self._template is None:
            raise InvalidArgument(
                "chat: the checkpoint has no chat template; send a completion instead",
                field="chat",
                reason="NO_CHAT_TEMPLATE",
            )
        if not messages:
            raise InvalidArgument(
                "chat.messages: at least 1 message is needed, got 0", field="chat.messages", limit=1, value=0
            )
        image_count = sum(isinstance(part, ImagePart) for message in messages for part in message.parts)
        self._check_modality(image_count, "chat")
        self._probe()
        texts = [part.text for message in messages for part in message.parts if isinstance(part, TextPart)]
        try:
            disguise = self._encoder.disguise(texts)
            conversation = [
                {
                    "role": message.role,
                    "content": self._content(
                        [
                            TextPart(self._encoder.cover(part.text, disguise)) if isinstance(part, TextPart) else part
                            for part in message.parts
                        ],
                        f"chat.messages[{index}]",
                    ),
                }
                for index, message in enumerate(messages)
            ]
            ids = self._encoder.encode(self._render(conversation), disguise)
        except TextNotEncodable as error:
            raise InvalidArgument(f"chat: {error}", field="chat") from error
        return self._segments(ids, image_count)

    def build_completion(self, parts: Sequence[PromptPart]) -> tuple[PromptSegment, ...]:
        """The parts as they are. Text and images get the tokenizer's own begin tokens, unless token ids stand first."""
        image_count = sum(isinstance(part, ImagePart) for part in parts)
        self._check_modality(image_count, "completion")
        segments: list[PromptSegment] = []
        run: list[int] = []
        image_index = 0
        for index, part in enumerate(_join_texts(parts)):
            if isinstance(part, TextPart):
                run += self._encode_text(part.text, first=index == 0)
            elif isinstance(part, TokenIdsPart):
                self._check_ids(part.ids)
                run += part.ids
            else:
                segments += [PromptTokens((*run, *self._image_start)), PromptImage(image_index)]
                run = [*self._image_end]
                image_index += 1
        segments.append(PromptTokens(tuple(run)))
        begin = bool(parts) and not isinstance(parts[0], TokenIdsPart)
        return self._finished(segments, begin=begin, field="completion")

    def _encode_text(self, text: str, *, first: bool) -> list[int]:
        try:
            disguise = self._encoder.disguise([text])
            return self._encoder.encode(self._encoder.cover(text, disguise), disguise, first=first)
        except TextNotEncodable as error:
            raise InvalidArgument(f"completion: {error}", field="completion.parts") from error

    def _content(self, parts: Sequence[PromptPart], field: str) -> str | list[dict[str, str]]:
        """A message's content in the shape the template reads."""
        content: list[dict[str, str]] = []
        for part in parts:
            if isinstance(part, TokenIdsPart):
                raise InvalidArgument(
                    f"{field}.parts: token_ids are accepted in a completion only", field=f"{field}.parts"
                )
            content.append({"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"})
        only_text = all(part["type"] == "text" for part in content)
        if only_text and (not self._takes_parts or (self._takes_strings and len(content) == 1)):
            return "".join(part["text"] for part in content)
        if not only_text and not self._takes_parts:
            raise InvalidArgument(
                f"{field}.parts: the checkpoint's chat template takes text only, got an image", field=f"{field}.parts"
            )
        return content

    def _probe(self) -> None:
        """Finds out, once, which shapes of content the template reads: a string, a list of parts, or both."""
        if self._template is None or self._takes_strings is not None:
            return
        takes = {}
        for shape, content in (("string", "probe-text"), ("parts", [{"type": "text", "text": "probe-text"}])):
            try:
                text = self._template.render([{"role": "user", "content": content}])
            except TemplateError as error:
                log.info("the chat template does not take content as %s: %s", shape, error)
                text = ""
            # A template that prints the list as it is does not read it.
            takes[shape] = "probe-text" in text and "'type'" not in text and '"type"' not in text
        if not any(takes.values()):
            log.warning("the chat template shows no text of a lone user message; chats will probably be refused")
        self._takes_parts, self._takes_strings = takes["parts"], takes["string"]

    def _render(self, conversation: list[dict[str, Any]]) -> str:
        assert self._template is not None
        try:
            return self._template.render(conversation)
        except TemplateTooSlow as error:
            limit = self._template.limit_seconds
            raise ResourceExhausted(f"chat: {error}", field="chat", limit=limit, reason="TEMPLATE_TIME") from error
        except TemplateRefused as error:
            raise InvalidArgument(
                f"chat.messages: the chat template refused them: {error}",
                field="chat.messages",
                reason="TEMPLATE_REFUSED",
            ) from error
        except TemplateError as error:
            raise InvalidArgument(f"chat.messages: {error}", field="chat.messages", reason="TEMPLATE_FAILED") from error

    def _segments(self, ids: list[int], image_count: int) -> tuple[PromptSegment, ...]:
        segments: list[PromptSegment] = []
        run: list[int] = []
        found = 0
        for token_id in ids:
            if token_id == self._image_token_id:
                segments += [PromptTokens(tuple(run)), PromptImage(found)]
                run = []
                found += 1
            else:
                run.append(token_id)
        segments.append(PromptTokens(tuple(run)))
        if found != image_count:
            raise InvalidArgument(
                f"chat: the chat template placed {found} images, the request has {image_count}",
                field="chat.messages",
                limit=image_count,
                value=found,
                reason="IMAGES_LOST",
            )
        return self._finished(segments, begin=False, field="chat")

    def _finished(self, segments: list[PromptSegment], *, begin: bool, field: str) -> tuple[PromptSegment, ...]:
        kept = [segment for segment in segments if not isinstance(segment, PromptTokens) or segment.ids]
        if not kept:
            raise InvalidArgument(
                f"{field}: the prompt is empty, at least 1 token is needed", field=field, limit=1, value=0
            )
        if begin and self._encoder.prefix_ids:
            head = kept[0]
            if isinstance(head, PromptTokens):
                kept[0] = PromptTokens((*self._encoder.prefix_ids, *head.ids))
            else:
                kept.insert(0, PromptTokens(self._encoder.prefix_ids))
        return tuple(kept)

    def _check_modality(self, image_count: int, field: str) -> None:
        if image_count and not self.takes_images:
            raise InvalidArgument(
                f"{field}: the model takes no images, got {image_count}",
                field=field,
                limit=0,
                value=image_count,
                reason="MODALITY",
            )

    def _check_ids(self, ids: Sequence[int]) -> None:
        field = "completion.parts.token_ids"
        for token_id in ids:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidArgument(
                    f"{field}: {token_id} is not in [0, {self._vocab_size})",
                    field=field,
                    limit=self._vocab_size,
                    value=token_id,
                )
            if token_id in self._placeholder_ids:
                raise InvalidArgument(
                    f"{field}: {token_id} is an image placeholder; send the image as a part",
                    field=field,
                    value=token_id,
                )


def read_chat_template(tokenizer: Any, path: Path) -> str | None:
    """The checkpoint's default chat template, from the tokenizer's or the processor's files; None without one."""
    template = tokenizer.chat_template
    legacy = path / "chat_template.json"
    if template is None and legacy.exists():
        template = json.loads(legacy.read_text(encoding="utf-8"))["chat_template"]
    if isinstance(template, dict):
        if "default" not in template:
            raise ValueError(f"the checkpoint has several chat templates and no default one: {sorted(template)}")
        template = template["default"]
    return template


def _join_texts(parts: Sequence[PromptPart]) -> list[PromptPart]:
    """Neighbouring texts as one, so that where a client cut them does not show in the ids."""
    joined: list[PromptPart] = []
    for part in parts:
        if isinstance(part, TextPart) and joined and isinstance(joined[-1], TextPart):
            joined[-1] = TextPart(joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined
