"""Tidemill on Ray Data: engines as actors over a Dataset (docs/integrations/ray.md).

`build_processor` and its configuration implement Ray's own interface, which may change in any
release. They are experimental and loaded on first use, so that such a change does not break
`answer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .sdk.integrations.ray.answer import answer, decide

if TYPE_CHECKING:
    from .sdk.integrations.ray.processor import Processor, build_processor
    from .sdk.integrations.ray.processor_config import vLLMEngineProcessorConfig

__all__ = ["Processor", "answer", "build_processor", "decide", "vLLMEngineProcessorConfig"]


def __getattr__(name: str) -> object:
    """Import the processor and its configuration on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .sdk.integrations.ray import processor, processor_config

    return getattr(processor_config if name == "vLLMEngineProcessorConfig" else processor, name)
