"""Loads a checkpoint as the service does."""

from __future__ import annotations

from llm_svc.loading import LoadedModel, load_model
from llm_svc.service import open_source
from llm_svc.settings import LlmSettings
from svc_common.weight_stream import Progress


def load(settings: LlmSettings, progress: Progress = lambda done, expected: None) -> LoadedModel:
    """Raises LoadError for whatever is wrong with the checkpoint."""
    source = open_source(settings)
    try:
        return load_model(settings, source, progress)
    finally:
        source.close()
