"""Incremental text equals the full decode, for byte-level, Metaspace and byte-fallback tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from llm_svc.detokenizer import Detokenizer, spellings_of

FAMILY = "👩‍👩‍👧 ďábel 世界"


def byte_level() -> Any:
    """Merges inside emoji, so tokens end in the middle of characters."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, min_frequency=1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator([FAMILY, "hello world, hello family 👩‍👦 👩‍👩‍👦"] * 4, trainer)
    core.add_special_tokens(["<|end|>"])
    core.add_tokens([AddedToken("<think>", special=False), AddedToken("Ġodd é", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=core)


def metaspace() -> Any:
    """SentencePiece style: the decoder strips the space before the first word."""
    pieces = ["<unk>", "▁", "▁he", "llo", "▁world", "▁▁", "a", "é", "世", "▁👩", "\u200d"]
    core = Tokenizer(models.Unigram([(piece, -float(rank)) for rank, piece in enumerate(pieces)], unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    core.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=core)


def byte_fallback() -> Any:
    """Llama 2 style: unknown characters come as <0x..> tokens, one invalid byte spoils its run."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁he", "llo", "▁▁", "a", "世"]
    core = Tokenizer(models.BPE({piece: rank for rank, piece in enumerate(pieces)}, [], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=core)


TOKENIZERS = {"byte_level": byte_level(), "metaspace": metaspace(), "byte_fallback": byte_fallback()}


def stream(tokenizer: Any, ids: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_together_equal_the_full_decode(name: str, skip_special_tokens: bool, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    # Ids past the end stand for a model's padded vocabulary.
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 2), max_size=40))
    full = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    assert "".join(stream(tokenizer, ids, skip_special_tokens=skip_special_tokens)) == full


@given(text=st.text(st.sampled_from([*"ab 👩‍👧👨🏽é世界🇨🇿\u0301\n"]), max_size=30))
def test_whole_characters_never_show_a_replacement_character(text: str) -> None:
    for name in ("byte_level", "byte_fallback"):
        tokenizer = TOKENIZERS[name]
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert all("\ufffd" not in piece for piece in stream(tokenizer, ids)[:-1])


def test_the_emoji_family_comes_whole_though_its_tokens_are_parts_of_characters() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [
        tokenizer.convert_tokens_to_ids(char)
        for char in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(FAMILY)[0][0]
    ]
    assert any("\ufffd" in tokenizer.decode([token_id]) for token_id in ids), "the case needs split characters"
    pieces = stream(tokenizer, ids)
    assert "" in pieces, "a token inside a character carries no text yet"
    assert "".join(pieces) == "👩‍👩‍👧"


def test_an_unfinished_character_is_flushed_as_the_full_decode_shows_it() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("世", add_special_tokens=False)
    byte_ids = [tokenizer.convert_tokens_to_ids(char) for char in "\xe4\xb8"]
    assert ids and stream(tokenizer, byte_ids) == ["", "", tokenizer.decode(byte_ids)] == ["", "", "\ufffd"]


def test_special_tokens_are_skipped_inside_a_character_too() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    first, *rest = [tokenizer.convert_tokens_to_ids(char) for char in "\xe4\xb8\u0138"]
    assert "".join(stream(tokenizer, [first, end, *rest, end])) == "世"


def test_metaspace_keeps_spaces_between_words_and_drops_the_first() -> None:
    tokenizer = TOKENIZERS["metaspace"]
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    assert [piece for piece in stream(tokenizer, ids) if piece] == ["he", "llo", " world"]


def test_cost_is_linear_because_the_decoded_window_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, token in (("metaspace", "llo"), ("byte_fallback", "a")):
        tokenizer = TOKENIZERS[name]
        spellings = spellings_of(tokenizer)
        windows: list[int] = []
        decode = spellings.decode
        monkeypatch.setattr(
            spellings, "decode", lambda ids, decode=decode, windows=windows: windows.append(len(ids)) or decode(ids)
        )
        stream(tokenizer, [tokenizer.convert_tokens_to_ids(token)] * 500)
        assert max(windows) <= 2
        assert len(windows) <= 2 * 501


@pytest.mark.parametrize("name", TOKENIZERS)
def test_token_bytes_of_a_text_are_the_texts_bytes(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    spellings = spellings_of(tokenizer)
    text = {"byte_level": FAMILY, "metaspace": "hello world", "byte_fallback": "世"}[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    spelled = b"".join(spellings.token_bytes(token_id) for token_id in ids)
    assert spelled.decode().removeprefix(" ") == text
    assert spellings.token_bytes(len(tokenizer) + 5) == b""


def test_a_byte_token_spells_its_byte_and_a_special_token_its_name() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    assert Detokenizer(tokenizer).token_bytes(tokenizer.convert_tokens_to_ids("<0xE2>")) == b"\xe2"
    assert Detokenizer(tokenizer).token_bytes(tokenizer.convert_tokens_to_ids("</s>")) == b"</s>"


def test_the_tiny_checkpoint_streams_its_own_encoding(tiny_checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    ids = tokenizer.encode(FAMILY + "\n plain text", add_special_tokens=False)
    assert "".join(stream(tokenizer, ids)) == FAMILY + "\n plain text"
