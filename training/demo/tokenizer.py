"""The demo model's byte-level BPE: trained on the real text and on what the tasks say, digits one by one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from day0.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS
from training.demo.catalogue import FAMILIES
from training.demo.lexicon import COLOURS, PICTURE_WORDS, SHAPES, WORDS, names, towns
from training.demo.prose import prose
from training.demo.splits import TRAIN
from training.demo.tasks.room import Room

VOCABULARY_TOKENS = 2048
CONTEXT_TOKENS = 16_640
FILE = Path(__file__).parent / "tokenizer.json"
CONVERSATIONS_PER_TASK = 400


def corpus() -> Iterator[str]:
    """The training text and sentences of every task; words of answers often enough to become few tokens."""
    yield from prose(TRAIN).splitlines()
    random = Random("tokenizer")
    for family in FAMILIES.values():
        for _ in range(CONVERSATIONS_PER_TASK):
            for turn in family.make(Room(random, TRAIN, tokens=300)):
                yield from (part for part in turn.user if isinstance(part, str))
                yield turn.answer
    for _ in range(8):
        yield from (f"The word is {word}." for word in PICTURE_WORDS)
    yield from (" " + word for word in WORDS for _ in range(60))
    yield from (f" {word}" for word in (*COLOURS, *SHAPES) for _ in range(300))
    # Names and towns made of syllables: their parts become tokens, the names themselves do not.
    for _ in range(2):
        yield from (f"{name} {name}" for name in (*names(TRAIN), *towns()))


def train_core() -> Tokenizer:
    """Train the tokenizer of exactly 2,048 tokens; the special tokens take the highest ids."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(corpus(), trainer)
    core.add_special_tokens(list(SPECIAL_TOKENS))
    assert core.get_vocab_size() == VOCABULARY_TOKENS, core.get_vocab_size()
    return core


@cache
def load_core() -> Tokenizer:
    """The committed tokenizer."""
    return Tokenizer.from_file(str(FILE))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The committed tokenizer as transformers knows it, with the chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(FILE)),
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS[1:]),
        model_max_length=CONTEXT_TOKENS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


if __name__ == "__main__":
    train_core().save(str(FILE))
