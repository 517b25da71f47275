"""A model's config.json: read, and refused where it describes what its weights cannot be.

Whatever it says, transformers would build: a network of a million layers, or one that is filled
with random numbers because its widths are another model's. Both take minutes, or all memory.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.errors import ModelRefused, first_line_of

# The deepest models have some 130.
MAX_LAYERS = 1_000
_COUNTS = (
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "hidden_size",
    "max_position_embeddings",
)


def read_description(name: str) -> Any:
    """Return transformers' config of a folder or hub id; `ModelRefused` says why there is none."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as exc:  # what a config holds may fail anywhere in transformers
        raise ModelRefused(f"{name}: cannot be read as a model: {first_line_of(exc)}") from exc


def check_description(name: str, config: Any, num_bytes: int) -> None:
    """Refuse a network that `num_bytes` of weights cannot fill, without building it."""
    from transformers import AutoModelForCausalLM

    for key in _COUNTS:
        value = getattr(config, key, None)
        if value is not None and not (type(value) is int and value > 0):
            raise ModelRefused(f"{name}: config.json says {key} {value!r}; it must be a count.")
    layers = config.num_hidden_layers
    if layers > MAX_LAYERS:
        raise ModelRefused(
            f"{name}: config.json says num_hidden_layers {layers:,}; no model has above "
            f"{MAX_LAYERS:,}."
        )
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    num_weights = sum(weight.numel() for weight in network.parameters())
    if num_weights > num_bytes:
        raise ModelRefused(
            f"{name}: config.json describes {num_weights:,} weights, but the files hold "
            f"{num_bytes:,} bytes: one of the two is another model's, or a file is missing."
        )
