"""HF configs after the settings' overrides, with the rope for a context and its longest context."""

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
from .refused_types import refusal_of_head, use_of_head


def read_overridden_config(settings: EngineConfig) -> HFConfig:
    """Return the config of a text-generation model after the settings' overrides."""
    read = read_hf_config(settings.model)
    if isinstance(read.raw.get("text_config"), dict):
        _refuse_keys_of_text(settings, read.raw)
    raw = merge(read.raw, settings.hf_overrides)
    parsed = replace(
        parse_hf_config(settings.model, raw), is_overridden=bool(settings.hf_overrides)
    )
    _refuse_unread(settings, read, parsed)
    if use_of_head(parsed.architecture) is not None:
        raise ModelRefused(f"{settings.model}: {refusal_of_head(parsed.architecture)}")
    return parsed


def with_context(hf_config: HFConfig, settings: EngineConfig) -> HFConfig:
    """Return a config whose rope is for the context that the settings request."""
    raw = for_context(hf_config.raw, settings.max_model_len)
    parsed = parse_hf_config(hf_config.name, raw)
    return replace(parsed, is_overridden=hf_config.is_overridden)


def longest_context(hf_config: HFConfig) -> int | None:
    """Return the context that long rope factors would allow, if short ones are used."""
    longest = hf_config.fields.get("max_position_embeddings")
    ropes = [rope for key in ROPES if (rope := long_rope(hf_config.fields, key)) is not None]
    if not ropes or type(longest) is not int:
        return None
    is_longer = any(longest > original and not is_switched(rope) for rope, original in ropes)
    return longest if is_longer else None


def _refuse_unread(settings: EngineConfig, read: HFConfig, parsed: HFConfig) -> None:
    """Refuse overrides that add fields without effect."""
    added = parsed.fields.keys() - read.fields.keys()
    if unread := sorted(key for key in added if not may_read(parsed.model_type, key)):
        raise ModelRefused(
            f"{settings.model}: --hf-overrides sets {unread[0]}, which transformers' classes of "
            f"model type {parsed.model_type!r} never read: remove it or check its name."
        )


def _refuse_keys_of_text(settings: EngineConfig, raw: Mapping[str, Any]) -> None:
    """Refuse overrides of a multimodal model that would have no effect on its text model."""
    known = {*raw, TIE}
    for key in settings.hf_overrides:
        if not (key in known or is_config(key)):
            raise ModelRefused(
                f"{settings.model}: --hf-overrides sets {key}, which is not at the top level of "
                "this model's config.json; for its text model use "
                f'\'{{"text_config": {{"{key}": …}}}}\'.'
            )
