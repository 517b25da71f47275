"""Published models that the decoder does not support, for docs/reference/models.md.

Each has a field in its config.json for a feature that the decoder does not implement.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class LeftOut(NamedTuple):
    """Models of a family that its decoder does not run, and the field of their config.json."""

    models: str
    field: str
    value: Any


LEFT_OUT: Mapping[str, LeftOut] = MappingProxyType(
    {
        "cohere": LeftOut("Command R+", "use_qk_norm", value=True),
        "falcon": LeftOut("Falcon-RW", "alibi", value=True),
        "gemma4_text": LeftOut("Gemma 4 E2B and E4B", "hidden_size_per_layer_input", 256),
        "opt": LeftOut("OPT 350M", "do_layer_norm_before", value=False),
        "stablelm": LeftOut("StableLM 2 12B", "qk_layernorm", value=True),
    }
)
