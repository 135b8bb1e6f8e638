"""What the tests of the demo model's data share: its tokenizer, and a painter for machines without the font files."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from training.demo import heldout
from training.demo.picture import Picture
from training.demo.tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def grey(picture: Picture) -> np.ndarray:
    """Stands for the painter where pixels do not matter; each picture has a level of its own."""
    return np.full((112, 112, 3), picture.seed % 256, dtype=np.uint8)


@pytest.fixture
def grey_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out examples without font files."""
    monkeypatch.setattr(heldout, "painter", lambda: grey)
