"""Settings name the variable at fault, and images always fit the messages that carry them."""

from __future__ import annotations

from pathlib import Path

import pytest

from svc_common.settings import SettingsError, read_settings
from vision_svc.settings import VisionSettings


def read(**variables: str) -> VisionSettings:
    return read_settings(VisionSettings, {f"DAY0_VISION_{name}": value for name, value in variables.items()})


def test_environment_is_read_into_the_decode_rules() -> None:
    settings = read(MODEL="/m", BACKGROUND="1,2,3", MAX_IMAGE_PIXELS="99", MAX_FRAMES="2", MAX_ASPECT_RATIO="8")
    assert settings.model == "/m"
    rules = settings.decode_rules
    assert (rules.background, rules.max_image_pixels, rules.max_frames, rules.max_aspect_ratio) == ((1, 2, 3), 99, 2, 8)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BACKGROUND", "1,2"),
        ("BACKGROUND", "1,2,256"),
        ("MAX_IMAGE_PIXELS", "0"),
        ("MAX_ASPECT_RATIO", "nan"),
        ("MAX_ASPECT_RATIO", "0.5"),
        ("PATCH_BUDGET", "-1"),
        ("DTYPE", "float64"),
        ("BATCH_WAIT_MS", "inf"),
        ("PATCH_BUGDET", "1"),
    ],
)
def test_bad_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"DAY0_VISION_{name}"):
        read(MODEL="/m", **{name: value})


def test_model_may_be_a_path_or_a_uri() -> None:
    assert VisionSettings(model=Path("/m")).model == "/m"
    assert read(MODEL="s3://bucket/m").model == "s3://bucket/m"


def test_model_is_required() -> None:
    with pytest.raises(SettingsError, match="DAY0_VISION_MODEL"):
        read()


def test_image_must_fit_its_message() -> None:
    with pytest.raises(SettingsError, match=r"max_image_bytes 1000000 does not fit max_message_bytes 1000000"):
        read(MODEL="/m", MAX_IMAGE_BYTES="1000000", MAX_MESSAGE_BYTES="1000000")


def test_image_must_fit_the_queue() -> None:
    with pytest.raises(SettingsError, match=r"max_waiting_bytes 999 is below max_image_bytes 1000"):
        read(MODEL="/m", MAX_IMAGE_BYTES="1000", MAX_WAITING_BYTES="999")
