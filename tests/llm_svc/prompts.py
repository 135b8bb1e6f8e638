"""What the prompt tests share: small tokenizers, and ids out of segments."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from llm_svc.core import PromptSegment, PromptTokens
from llm_svc.prompt import PromptBuilder
from llm_svc.prompt_parts import ChatMessage, PromptPart, TextPart


def user(*parts: PromptPart | str) -> ChatMessage:
    return ChatMessage("user", tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


def ids_of(segments: tuple[PromptSegment, ...]) -> list[int]:
    """All ids of a prompt without images."""
    assert all(isinstance(segment, PromptTokens) for segment in segments)
    return [token_id for segment in segments if isinstance(segment, PromptTokens) for token_id in segment.ids]


def expanded(segments: tuple[PromptSegment, ...], image_id: int, visual_tokens: list[int]) -> list[int]:
    """Ids with each image's place filled by as many placeholders as it has visual tokens."""
    ids: list[int] = []
    for segment in segments:
        ids += segment.ids if isinstance(segment, PromptTokens) else [image_id] * visual_tokens[segment.index]
    return ids


def plain_tokenizer(*, template: str | None = None, begin: bool = False, **options: Any) -> Any:
    """A byte-level tokenizer of single bytes with a few control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({char: rank for rank, char in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>"])
    core.add_tokens([AddedToken("<think>", special=False, normalized=True)])
    core.add_tokens([AddedToken(token, **flags) for token, flags in options.items()])
    if begin:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", chat_template=template)


def plain_builder(tokenizer: Any, **options: Any) -> PromptBuilder:
    return PromptBuilder(tokenizer, chat_template=tokenizer.chat_template, vocab_size=len(tokenizer), **options)


# Parity with upstream
