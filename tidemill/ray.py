"""Tidemill on Ray Data: engines as actors over a Dataset (docs/engines/ray.md)."""

from __future__ import annotations

from .sdk.integrations.ray.answer import answer
from .sdk.integrations.ray.processor import Processor, build_processor
from .sdk.integrations.ray.processor_config import vLLMEngineProcessorConfig

__all__ = ["Processor", "answer", "build_processor", "vLLMEngineProcessorConfig"]
