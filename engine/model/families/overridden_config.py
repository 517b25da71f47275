"""HF configs as settings override them: read, for a context, and the longest context of a rope."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...config import EngineConfig
from ...errors import ModelRefused
from ..config.hf_config import TIE, HFConfig, parse_hf_config, read_hf_config
from ..config.rope import is_switched
from ..config.transformers_fields import ROPES, may_read
from .overrides import for_context, is_config, long_rope, merge


def read_overridden_config(settings: EngineConfig) -> HFConfig:
    """Return the description of a model that writes text, as the settings override it."""
    read = read_hf_config(settings.model)
    if isinstance(read.raw.get("text_config"), dict):
        _refuse_keys_of_text(settings, read.raw)
    said = merge(read.raw, settings.hf_overrides)
    parsed = replace(
        parse_hf_config(settings.model, said), is_overridden=bool(settings.hf_overrides)
    )
    _refuse_unread(settings, read, parsed)
    return parsed


def with_context(hf_config: HFConfig, settings: EngineConfig) -> HFConfig:
    """Return a description, its rope for the context that the settings ask for."""
    said = for_context(hf_config.raw, settings.max_model_len)
    parsed = parse_hf_config(hf_config.name, said)
    return replace(parsed, is_overridden=hf_config.is_overridden)


def longest_context(hf_config: HFConfig) -> int | None:
    """Return the context that long rope factors would give where short ones were chosen."""
    longest = hf_config.fields.get("max_position_embeddings")
    ropes = [rope for key in ROPES if (rope := long_rope(hf_config.fields, key)) is not None]
    if not ropes or type(longest) is not int:
        return None
    is_longer = any(longest > original and not is_switched(rope) for rope, original in ropes)
    return longest if is_longer else None


def _refuse_unread(settings: EngineConfig, read: HFConfig, parsed: HFConfig) -> None:
    """Refuse overrides that add fields which would change nothing."""
    added = parsed.fields.keys() - read.fields.keys()
    if unread := sorted(key for key in added if not may_read(parsed.model_type, key)):
        raise ModelRefused(
            f"{settings.model}: --hf-overrides says {unread[0]}, which transformers' classes of "
            f"model type {parsed.model_type!r} never read."
        )


def _refuse_keys_of_text(settings: EngineConfig, said: Mapping[str, Any]) -> None:
    """Refuse overrides of a model of more than text that would change nothing of its text."""
    known = {*said, TIE}
    for key in settings.hf_overrides:
        if not (key in known or is_config(key)):
            raise ModelRefused(
                f"{settings.model}: --hf-overrides says {key}, which is not at the top of this "
                f'model\'s config.json; of its text write \'{{"text_config": {{"{key}": …}}}}\'.'
            )
