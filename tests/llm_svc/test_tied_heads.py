"""Whether configuration and checkpoint agree about the head: all the ways in which they can, in both tiers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm5NextForConditionalGeneration

from llm_svc.build import LoadError
from llm_svc.settings import LlmSettings
from svc_common.checkpoint import INDEX_NAME
from tests.llm_svc.checkpoints import load

HEAD, EMBEDDING = "lm_head.weight", "model.language_model.embed_tokens.weight"
TIERS = pytest.mark.parametrize("tier", ["native", "upstream"])


def make(source: Path, folder: Path, *, tied: bool, head: str, embedding: str = "present") -> Path:
    """A copy whose head is "absent", "equal" to the embedding, or its "own"; the embedding may be "absent" too."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = tied
    (folder / "config.json").write_text(json.dumps(config))
    index = json.loads((folder / INDEX_NAME).read_text())
    owners = index["weight_map"]
    embedded = load_file(folder / owners[EMBEDDING])[EMBEDDING]
    for name, how in ((HEAD, head), (EMBEDDING, embedding)):
        file = folder / owners[name]
        tensors = load_file(file)
        if how == "absent":
            del tensors[name], owners[name]
        elif how == "equal":
            tensors[name] = embedded.clone()
        save_file(tensors, file, metadata={"format": "pt"})
    (folder / INDEX_NAME).write_text(json.dumps(index))
    return folder


def head_and_embedding(folder: Path, tier: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Both weights as the service has them."""
    model = load(LlmSettings(model=str(folder), block_size=16, tier=tier)).runner.model
    language_model = model.language_model if tier == "native" else model.model.language_model
    return model.lm_head.weight, language_model.embed_tokens.weight


@TIERS
@pytest.mark.parametrize(
    ("tied", "head", "one_tensor"),
    [
        (True, "absent", True),
        (True, "equal", True),
        # The configuration is wrong then. Upstream keeps what is in the checkpoint, and so do we.
        (True, "own", False),
        (False, "own", False),
        (False, "equal", False),
    ],
)
def test_the_head_is_the_one_upstream_has(
    tiny_checkpoint: Path, tmp_path: Path, tier: str, tied: bool, head: str, one_tensor: bool
) -> None:
    folder = make(tiny_checkpoint, tmp_path / "checkpoint", tied=tied, head=head)
    ours, embedding = head_and_embedding(folder, tier)
    assert (ours.data_ptr() == embedding.data_ptr()) == one_tensor
    right = load_file(folder / json.loads((folder / INDEX_NAME).read_text())["weight_map"][EMBEDDING])[EMBEDDING]
    assert torch.equal(embedding, right)
    assert torch.equal(ours, right) == (head != "own")
    upstream = Glm5NextForConditionalGeneration.from_pretrained(folder)
    assert torch.equal(ours, upstream.lm_head.weight)


@TIERS
def test_an_untied_head_that_is_absent_is_refused(tiny_checkpoint: Path, tmp_path: Path, tier: str) -> None:
    """Upstream would fill it with random numbers and warn."""
    folder = make(tiny_checkpoint, tmp_path / "checkpoint", tied=False, head="absent")
    with pytest.raises(LoadError, match=rf"missing keys: {HEAD}"):
        head_and_embedding(folder, tier)


@TIERS
def test_a_tied_checkpoint_may_have_the_head_alone(tiny_checkpoint: Path, tmp_path: Path, tier: str) -> None:
    folder = make(tiny_checkpoint, tmp_path / "checkpoint", tied=True, head="own", embedding="absent")
    ours, embedding = head_and_embedding(folder, tier)
    assert ours.data_ptr() == embedding.data_ptr()
    assert torch.equal(
        ours, load_file(folder / json.loads((folder / INDEX_NAME).read_text())["weight_map"][HEAD])[HEAD]
    )


@TIERS
def test_a_tied_checkpoint_without_either_is_refused(tiny_checkpoint: Path, tmp_path: Path, tier: str) -> None:
    folder = make(tiny_checkpoint, tmp_path / "checkpoint", tied=True, head="absent", embedding="absent")
    with pytest.raises(LoadError, match=r"missing keys: .*embed_tokens\.weight"):
        head_and_embedding(folder, tier)
