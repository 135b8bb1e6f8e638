"""Text to token ids such that what a user wrote never becomes a control token; knows no messages and no images.

A control token is any added token of the tokenizer whose text is not only white space, special or not. A text in which
no user spelled one is encoded exactly as the tokenizer itself does. Otherwise the runs between the template's own
control tokens that contain a hidden spelling are encoded by the same tokenizer without its control tokens.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any

from tokenizers import Tokenizer

from llm_svc.disguise import Disguise, Spellings, TextNotEncodable


class TextEncoder:
    """Encodes with the backend of a Hugging Face fast tokenizer.

    `template` is the source of the chat template: control tokens that it names and that are not special may be searched
    for in messages. `never_searched` are ids that are hidden from it all the same. Raises ValueError for tokenizers
    whose control tokens cannot be told from text reliably.
    """

    def __init__(self, tokenizer: Any, *, template: str = "", never_searched: Collection[int] = ()) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{type(tokenizer).__name__} has no fast backend (tokenizer.json); it is not supported")
        spec = json.loads(backend.to_str())
        spec["truncation"] = spec["padding"] = None
        single = [token["content"] for token in spec["added_tokens"] if token["single_word"]]
        if single:
            raise ValueError(f"added tokens with single_word are not supported: {single[:8]}")
        control = [token for token in spec["added_tokens"] if not token["content"].isspace()]
        self._control: dict[int, str] = {token["id"]: token["content"] for token in control}
        self._unknown_id = _unknown_id(spec["model"])
        self._normalized = [token["content"] for token in control if token["normalized"]]
        self._full = Tokenizer.from_str(json.dumps(spec))
        self._full_later = _without_prefix_space(spec, self._full)
        plain = _without_control_tokens(spec)
        self._plain = Tokenizer.from_str(json.dumps(plain))
        self._plain_later = _without_prefix_space(plain, self._plain)
        self._template = template
        self._spellings = Spellings(
            list(self._control.values()),
            [
                token["content"]
                for token in control
                if not token["special"] and token["id"] not in never_searched and token["content"] in template
            ],
        )
        self.prefix_ids = tuple(_special_prefix(self._full))

    def disguise(self, texts: Iterable[str]) -> Disguise:
        """A disguise for one request, whose texts are `texts`."""
        return Disguise([self._template, *self._control.values(), *texts])

    def cover(self, text: str, disguise: Disguise) -> str:
        """`text` as a template may see it: whatever spells a control token, or could become part of one, is hidden."""
        covered = self._spellings.cover(text, disguise)
        if self._normalizes_to_control(covered):
            return disguise.hide(text)
        return covered

    def encode(self, text: str, disguise: Disguise, *, first: bool = True) -> list[int]:
        """Ids of a covered or rendered text: control tokens become their ids, hidden text only plain ones.

        `first`: whether the text stands at the start of the prompt, which decides a leading space in some tokenizers.
        """
        full = self._full if first else self._full_later
        if not disguise.touches(text):
            return list(full.encode(text, add_special_tokens=False).ids)
        text = self._spellings.settle(text, disguise)
        encoding = full.encode(text, add_special_tokens=False)
        ids: list[int] = []
        run_ids: list[int] = []
        run_start = 0

        def close_run(run_end: int) -> None:
            run = text[run_start:run_end]
            if disguise.touches(run):
                ids.extend(self._encode_plain(disguise.reveal(run), first=first and run_start == 0))
            else:
                ids.extend(run_ids)

        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if self._is_control(token_id, text[start:end]):
                close_run(start)
                ids.append(token_id)
                run_ids, run_start = [], end
            else:
                run_ids.append(token_id)
        close_run(len(text))
        return ids

    def _encode_plain(self, text: str, *, first: bool) -> list[int]:
        ids: list[int] = []
        pieces = [text] if text else []
        while pieces:
            piece = pieces.pop()
            encoder = self._plain if first else self._plain_later
            encoding = encoder.encode(piece, add_special_tokens=False)
            # Where the model's own vocabulary spells a control token (Unigram's does), the text is cut inside it.
            spelled = [
                start
                for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
                if self._is_control(token_id, piece[start:end])
            ]
            if not spelled:
                ids += encoding.ids
                first = False
                continue
            if len(piece) == 1:
                raise TextNotEncodable(f"the tokenizer has no plain spelling of {piece!r}")
            cuts = sorted({min(start + 1, len(piece) - 1) for start in spelled})
            ends = [*cuts, len(piece)]
            # Last piece first: the list is a stack.
            pieces += [piece[start:end] for start, end in zip([0, *cuts], ends, strict=True)][::-1]
        return ids

    def _is_control(self, token_id: int, text: str) -> bool:
        """Whether the token stands for a control token; the unknown token also stands for any unknown text."""
        return token_id in self._control and (token_id != self._unknown_id or text.strip() == self._control[token_id])

    def _normalizes_to_control(self, covered: str) -> bool:
        """Whether normalisation would make a control token of what does not spell one."""
        normalizer = self._full.normalizer
        if normalizer is None or not self._normalized:
            return False
        normal = normalizer.normalize_str(covered)
        return any(
            normal.count(folded) > covered.count(token)
            for token in self._normalized
            if (folded := normalizer.normalize_str(token).strip())
        )


def _unknown_id(model: dict[str, Any]) -> int | None:
    if "unk_id" in model:
        return model["unk_id"]
    unknown = model.get("unk_token")
    return None if unknown is None else model["vocab"].get(unknown)


def _without_control_tokens(spec: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer without control tokens; white-space tokens stay where the model's vocabulary has them too."""
    vocabulary = spec["model"]["vocab"]
    known = set(vocabulary) if isinstance(vocabulary, dict) else {piece[0] for piece in vocabulary}
    kept = [token for token in spec["added_tokens"] if token["content"].isspace() and token["content"] in known]
    return {**spec, "added_tokens": kept, "post_processor": None}


def _without_prefix_space(spec: dict[str, Any], unchanged: Tokenizer) -> Tokenizer:
    """The tokenizer for text that does not stand first: Metaspace's "first" no longer adds a space."""
    found = False

    def walk(node: Any) -> Any:
        nonlocal found
        if isinstance(node, list):
            return [walk(item) for item in node]
        if not isinstance(node, dict):
            return node
        node = {key: walk(value) for key, value in node.items()}
        if node.get("type") == "Metaspace" and node.get("prepend_scheme") == "first":
            found = True
            node["prepend_scheme"] = "never"
        return node

    pre_tokenizer = walk(spec["pre_tokenizer"])
    if not found:
        return unchanged
    return Tokenizer.from_str(json.dumps({**spec, "pre_tokenizer": pre_tokenizer}))


def _special_prefix(tokenizer: Tokenizer) -> list[int]:
    """Ids that the tokenizer puts before every text, such as a begin token."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    ids = list(encoding.ids)
    for start in range(len(ids) - len(plain) + 1):
        if ids[start : start + len(plain)] == plain:
            return ids[:start]
    raise ValueError("the tokenizer's post-processor changes the text's own tokens; it is not supported")
