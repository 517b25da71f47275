"""Guard of `from_pretrained`: safetensors only, and no code or other files of the model.

`from_state` puts weights that we read into a class.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from ..weights.checkpoint import Checkpoint
from ..weights.weights import TEXT_OF_WHOLE
from .known_faults import correct_faults


def from_pretrained(
    auto_class: Any,
    checkpoint: Checkpoint,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    attention: str | None,
    is_multimodal: bool = False,
    ignore_mismatched_sizes: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Return a module for inference on a device, and transformers' loading info.

    The caller refuses missing weights by the loading info: transformers fills them at random.
    `attention` is the implementation, None transformers' default. `is_multimodal` takes the text
    model's weights out of a multimodal checkpoint.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # our errors replace its tables of misfits
    config.transformers_weights = None  # the name of a file, which a config must not choose
    module, loading_info = auto_class.from_pretrained(
        checkpoint.folder,
        config=config,
        dtype=dtype,
        attn_implementation=attention,
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=ignore_mismatched_sizes,
        key_mapping=_renamed(checkpoint, is_multimodal=is_multimodal),
        output_loading_info=True,
    )
    correct_faults(module)
    return module.eval().requires_grad_(requires_grad=False).to(device), loading_info


def _renamed(checkpoint: Checkpoint, *, is_multimodal: bool) -> dict[str, str] | None:
    """Return patterns of the names of a network's tensors in its files, with their replacements."""
    if checkpoint.prefix:
        return {f"^{re.escape(checkpoint.prefix)}": ""}
    return TEXT_OF_WHOLE if is_multimodal else None


def class_of(auto_class: Any, config: Any) -> Any:
    """Return the class that transformers has for a config, among those of an `auto_class`."""
    with torch.device("meta"):
        return type(auto_class.from_config(config, trust_remote_code=False))


def from_state(
    kind: Any,
    config: Any,
    state: dict[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    *,
    attention: str,
) -> tuple[Any, dict[str, Any]]:
    """Return a module of a class `kind` with these weights, and transformers' loading info.

    Names are those of a checkpoint. Otherwise it works like `from_pretrained`.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    module, loading_info = kind.from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=dtype,
        attn_implementation=attention,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    correct_faults(module)
    return module.eval().requires_grad_(requires_grad=False).to(device), loading_info
