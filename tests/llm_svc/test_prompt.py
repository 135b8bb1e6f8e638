"""Prompts: upstream's ids for plain text, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer, Glm5NextImageProcessorPil, Glm5NextProcessor

from llm_svc.core import PromptImage, PromptTokens
from llm_svc.prompt import PromptBuilder
from llm_svc.prompt_parts import ChatMessage, ImagePart, PromptPart, TextPart, TokenIdsPart
from svc_common.errors import InvalidArgument
from tests.llm_svc.prompts import expanded, ids_of, plain_builder, plain_tokenizer, user

PLAIN_TEXTS = [
    "What is in the picture?",
    " leading and trailing \n",
    "",
    "image",
    " user",
    "<think>not a token here</think> a < b <| c |> [d]",
    "ends like a token starts <|",
    "image|> starts like one ends",
    "👩‍👩‍👧 ďábel 世界",
    "code:\n\n    if x:\n        return {'a': 1}\n",
    "private use \U000f0000\U000f0001\U000f0002 stays",
]


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_chat_ids_equal_upstream_for_plain_text(builder: PromptBuilder, tokenizer: Any, text: str) -> None:
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert ids_of(builder.build_chat([user(text)])) == expected


def test_chat_ids_equal_upstream_over_several_turns(builder: PromptBuilder, tokenizer: Any) -> None:
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    texts = PLAIN_TEXTS[: len(roles)]
    expected = tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    messages = [ChatMessage(role, (TextPart(text),)) for role, text in zip(roles, texts, strict=True)]
    assert ids_of(builder.build_chat(messages)) == expected


def test_several_text_parts_equal_upstream(builder: PromptBuilder, tokenizer: Any) -> None:
    texts = PLAIN_TEXTS[:4]
    content = [{"type": "text", "text": text} for text in texts]
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert ids_of(builder.build_chat([user(*texts)])) == expected


class ImageOnlyProcessor(Glm5NextProcessor):
    """Upstream's processor without its video part, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return type(argument)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_image_prompts_equal_upstreams_processor_in_both_orders(
    builder: PromptBuilder, tokenizer: Any, tiny_checkpoint: Path, order: tuple[int, int]
) -> None:
    pictures = [Image.new("RGB", (64, 48), "red"), Image.new("RGB", (128, 96), "blue")]
    first, second = (pictures[index] for index in order)
    processor = ImageOnlyProcessor(
        image_processor=Glm5NextImageProcessorPil.from_pretrained(tiny_checkpoint),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    content = [
        {"type": "text", "text": "first:"},
        {"type": "image", "image": first},
        {"type": "text", "text": "second:"},
        {"type": "image", "image": second},
    ]
    upstream = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, add_generation_prompt=True, return_dict=True
    )
    visual_tokens = [int(np.prod(grid)) // 4 for grid in upstream["image_grid_thw"]]
    assert visual_tokens[0] != visual_tokens[1], "the order must show"
    segments = builder.build_chat([user("first:", ImagePart(), "second:", ImagePart())])
    assert [segment.index for segment in segments if isinstance(segment, PromptImage)] == [0, 1]
    image_id = tokenizer.convert_tokens_to_ids("<|image|>")
    assert expanded(segments, image_id, visual_tokens) == list(np.ravel(upstream["input_ids"]))


def test_images_are_numbered_over_all_messages(builder: PromptBuilder) -> None:
    segments = builder.build_chat(
        [user(ImagePart(), "a"), ChatMessage("assistant", (TextPart("b"),)), user(ImagePart())]
    )
    assert [segment.index for segment in segments if isinstance(segment, PromptImage)] == [0, 1]


# User text stays text


def test_completion_keeps_the_order_of_parts(builder: PromptBuilder, tokenizer: Any) -> None:
    start, end = (tokenizer.convert_tokens_to_ids(f"<|{name}_of_image|>") for name in ("begin", "end"))
    first, second = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("first:", "second:"))
    assert builder.build_completion(
        [TextPart("first:"), ImagePart(), TextPart("sec"), TextPart("ond:"), ImagePart(), TokenIdsPart((1, 2))]
    ) == (
        PromptTokens((*first, start)),
        PromptImage(0),
        PromptTokens((end, *second, start)),
        PromptImage(1),
        PromptTokens((end, 1, 2)),
    )


def test_completion_gets_the_tokenizers_begin_token_but_not_before_ready_ids() -> None:
    tokenizer = plain_tokenizer(begin=True)
    builder = plain_builder(tokenizer, image_token_id=257)
    assert ids_of(builder.build_completion([TextPart("ab")])) == tokenizer.encode("ab") == [256, *builder_ids("ab")]
    assert ids_of(builder.build_completion([TokenIdsPart((1, 2)), TextPart("a")])) == [1, 2, *builder_ids("a")]
    assert builder.build_completion([ImagePart()]) == (PromptTokens((256,)), PromptImage(0))


def builder_ids(text: str) -> list[int]:
    return list(plain_tokenizer().encode(text))


@pytest.mark.parametrize("token_id", [-1, 640, 2**31 - 1])
def test_token_ids_outside_the_vocabulary_are_refused(builder: PromptBuilder, token_id: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"token_ids.*{token_id}.*640"):
        builder.build_completion([TokenIdsPart((1, token_id))])


@pytest.mark.parametrize("token", ["<|image|>", "<|video|>"])
def test_placeholder_ids_are_refused(builder: PromptBuilder, tokenizer: Any, token: str) -> None:
    token_id = tokenizer.convert_tokens_to_ids(token)
    with pytest.raises(InvalidArgument, match=rf"{token_id} is an image placeholder"):
        builder.build_completion([TokenIdsPart((token_id,))])


# Bad input


@pytest.mark.parametrize(
    "parts", [[], [TextPart("")], [TokenIdsPart(())], [TextPart(""), TokenIdsPart(()), TextPart("")]]
)
@pytest.mark.parametrize("begin", [True, False])
def test_an_empty_completion_is_refused_and_the_next_one_works(parts: list[PromptPart], begin: bool) -> None:
    builder = plain_builder(plain_tokenizer(begin=begin))
    with pytest.raises(InvalidArgument, match=r"completion.*empty"):
        builder.build_completion(parts)
    assert ids_of(builder.build_completion([TextPart("a")]))


def test_a_template_that_renders_to_nothing_is_refused() -> None:
    builder = plain_builder(plain_tokenizer(template="{% for m in messages %}{% endfor %}"))
    with pytest.raises(InvalidArgument, match=r"chat.*empty"):
        builder.build_chat([user("a")])


def test_a_chat_without_messages_is_refused(builder: PromptBuilder) -> None:
    with pytest.raises(InvalidArgument, match=r"chat\.messages"):
        builder.build_chat([])


def test_a_chat_without_a_template_is_refused_and_says_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match=r"no chat template.*completion") as raised:
        plain_builder(plain_tokenizer()).build_chat([user("a")])
    assert raised.value.reason == "NO_CHAT_TEMPLATE"


def test_images_are_refused_where_the_model_takes_none() -> None:
    builder = plain_builder(plain_tokenizer(template="{{ messages[0].content }}"))
    for build in (
        lambda: builder.build_chat([user("a", ImagePart())]),
        lambda: builder.build_completion([ImagePart()]),
    ):
        with pytest.raises(InvalidArgument, match=r"no images.*1") as raised:
            build()
        assert raised.value.reason == "MODALITY"


def test_token_ids_are_refused_in_a_chat(builder: PromptBuilder) -> None:
    with pytest.raises(InvalidArgument, match=r"chat\.messages\[0\]\.parts.*completion only"):
        builder.build_chat([user(TokenIdsPart((1,)))])


def test_a_template_that_loses_an_image_is_refused() -> None:
    template = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
    builder = plain_builder(plain_tokenizer(template=template), image_token_id=257)
    with pytest.raises(InvalidArgument, match=r"placed 0 images.*1"):
        builder.build_chat([user("a", ImagePart())])


def test_what_the_template_refuses_is_the_callers_fault() -> None:
    template = "{{ messages[0].content if messages[0].role == 'user' else raise_exception('no system role') }}"
    builder = plain_builder(plain_tokenizer(template=template))
    with pytest.raises(InvalidArgument, match="no system role"):
        builder.build_chat([ChatMessage("system", (TextPart("a"),))])
    assert ids_of(builder.build_chat([user("a")]))


# The shapes of content that templates read


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + '!' }}",
        "{{ messages[0]['content'][0]['text'] ~ '!' }}",
        "{{ messages[0].content if messages[0].content is string else messages[0].content[0].text }}!",
    ],
    ids=["string only", "parts only", "both"],
)
def test_content_comes_in_the_shape_the_template_reads(template: str) -> None:
    tokenizer = plain_tokenizer(template=template)
    assert tokenizer.decode(ids_of(plain_builder(tokenizer).build_chat([user("hello")]))) == "hello!"


def test_text_parts_are_joined_for_a_template_that_reads_strings_only() -> None:
    tokenizer = plain_tokenizer(template="{{ messages[0].content + '!' }}")
    assert tokenizer.decode(ids_of(plain_builder(tokenizer).build_chat([user("a", "b")]))) == "ab!"


def test_the_processors_legacy_template_file_is_read(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_checkpoint / name, tmp_path / name)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "<|user|>{{ messages[0].content }}"}')
    builder = PromptBuilder.from_checkpoint(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert ids_of(builder.build_chat([user("a")])) == tokenizer.encode("<|user|>a", add_special_tokens=False)
