"""Ids that training sees equal the chat template's own text through the whole tokenizer."""

from __future__ import annotations

from random import Random

import pytest
from transformers import PreTrainedTokenizerFast

from training.demo.catalogue import FAMILIES
from training.demo.chat import IMAGE_TOKENS, Encoder
from training.demo.heldout import as_example, chat_messages
from training.demo.picture import Picture
from training.demo.tasks.room import Room
from training.demo.tokenizer import VOCABULARY_TOKENS, load_core


@pytest.mark.parametrize("task", FAMILIES)
def test_turns_encode_like_the_chat_template(
    task: str, tokenizer: PreTrainedTokenizerFast, grey_pictures: None
) -> None:
    encoder = Encoder(load_core())
    random = Random(task)
    for _ in range(5):
        turns = FAMILIES[task].make(Room(random, "train", tokens=500, at_start=True))
        ids = list(encoder.prefix)
        for index, turn in enumerate(turns):
            # The answer's end token is the next turn's <|user|>.
            question = encoder.question(turn)
            ids = (ids[:-1] if index else ids) + question + encoder.answer(turn)
        example = as_example(task, turns)
        messages = [*chat_messages(example), {"role": "assistant", "content": example.answer}]
        text = tokenizer.apply_chat_template(messages, tokenize=False) + "<|user|>"
        text = text.replace("<|image|>", "<|image|>" * IMAGE_TOKENS)
        assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_vocabulary(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == VOCABULARY_TOKENS == 2048
    digits = set("0123456789")
    several = [token for token in tokenizer.get_vocab() if digits & set(token) and len(token) > 1]
    assert not several, "digits stand alone"
    for text in ("The key of Mira is 5821.", "Größe 3 €\n\n x", "  two  blanks "):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_words_of_pictures_are_short(tokenizer: PreTrainedTokenizerFast) -> None:
    from training.demo.lexicon import PICTURE_WORDS

    lengths = [len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) for word in PICTURE_WORDS]
    assert len(lengths) > 400 and sum(lengths) / len(lengths) < 1.2


def test_a_system_message_comes_first(tokenizer: PreTrainedTokenizerFast) -> None:
    from training.demo.chat import Turn

    encoder = Encoder(load_core())
    ids = [*encoder.prefix, *encoder.question(Turn("sums", ("1 + 1",), "The sum is 2.", system="Be brief."))]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1"}]
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def test_an_unknown_special_token_is_named() -> None:
    with pytest.raises(ValueError, match=r"no token <\|nothing\|>"):
        Encoder(load_core()).special("<|nothing|>")


def test_phrases() -> None:
    shape = Picture("shape", ("orange", "star"), "train", 0)
    assert (shape.phrase, shape.sentence) == ("an orange star", "It is an orange star.")
    number = Picture("number", ("407",), "train", 0)
    assert (number.phrase, number.sentence) == ("the number 407", "The number is 407.")
