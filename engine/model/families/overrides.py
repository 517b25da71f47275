"""Overrides of a config.json: `--hf-overrides`, and the rope factors that a context requires.

Everything that reads the model afterwards reads the result, including transformers for the parity
check. The engine's own decoder chooses between rope factors per request. For encoders and models
that transformers runs they are chosen here, by the context, so that no row depends on others.

Nothing here imports a model library: a run needs its model's endpoints before it loads one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...config import EngineConfig
from ..config.transformers_fields import ROPES

# Parameters that a rope keeps when its scaling is overridden.
_KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section")
_ORIGINAL = "original_max_position_embeddings"


def overridden(raw: Mapping[str, Any], settings: EngineConfig) -> dict[str, Any]:
    """Return a config.json with overrides, its rope for the context that the settings request."""
    return for_context(merge(raw, settings.hf_overrides), settings.max_model_len)


def merge(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with overrides: nested configs are merged, all else is replaced.

    A rope is replaced except for its base and the rotated share of a head.
    """
    merged = dict(raw)
    for key, value in overrides.items():
        old = merged.get(key)
        if key in ROPES:
            _override_rope(merged, key, value)
        elif is_config(key) and isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged


def for_context(raw: Mapping[str, Any], context: int | None) -> dict[str, Any]:
    """Return a config with the rope factors for a context, also in its text model."""
    text = raw.get("text_config")
    if isinstance(text, dict):
        return {**raw, "text_config": _with_factors(text, context)}
    return _with_factors(raw, context)


def _with_factors(fields: Mapping[str, Any], context: int | None) -> dict[str, Any]:
    """Return a text model's config with long rope factors if its context exceeds the short ones.

    The choice is vLLM's: by the context that is served, not by the length of a request.
    """
    chosen = dict(fields)
    for key in ROPES:
        found = long_rope(fields, key)
        if found is not None and context is not None and context > found[1]:
            rope = found[0]
            long = {name[5:]: value for name, value in rope.items() if name.startswith("long_")}
            chosen[key] = {**rope, **{f"short_{name}": value for name, value in long.items()}}
    return chosen


def long_rope(fields: Mapping[str, Any], key: str) -> tuple[Mapping[str, Any], int] | None:
    """Return a rope with long factors, and how many positions its short ones are for."""
    rope = fields.get(key)
    if not isinstance(rope, Mapping) or not rope.get("long_factor"):
        return None
    from .registry import FAMILIES

    family = FAMILIES.get(str(fields.get("model_type")))
    usual = None if family is None else family.defaults.get(_ORIGINAL)
    original = rope.get(_ORIGINAL) or fields.get(_ORIGINAL) or usual
    return (rope, original) if type(original) is int else None


def _override_rope(merged: dict[str, Any], key: str, value: Any) -> None:
    """Replace the rope of a config, which may have either name."""
    at = next((name for name in ROPES if merged.get(name)), key)
    old = merged.get(at)
    for name in ROPES:
        merged.pop(name, None)
    merged[at] = _rope(old if isinstance(old, Mapping) else {}, {} if value is None else value)


def _rope(old: Mapping[str, Any], value: Any) -> Any:
    """Return the new rope; one that is given by kinds of layers is replaced kind by kind."""
    if not isinstance(value, Mapping):
        return value
    kinds = {kind for kind, part in old.items() if isinstance(part, Mapping)}
    if not kinds:
        return {**{key: old[key] for key in _KEPT if key in old}, **value}
    from .family import FULL

    if not value.keys() <= kinds:
        value = {FULL: value}  # layers with a window are not stretched
    return {**old, **{kind: _rope(old.get(kind) or {}, part) for kind, part in value.items()}}


def is_config(key: str) -> bool:
    """Return whether a key contains the config of a part of a model."""
    return key.endswith("_config") and key != "quantization_config"
