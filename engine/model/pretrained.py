"""Guard of `from_pretrained`: safetensors only, no code of the model's own, no other file."""

from __future__ import annotations

from typing import Any

import torch

from .checkpoint import Checkpoint
from .weights import TEXT_OF_WHOLE


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

    The caller refuses what the loading info lacks: transformers fills it at random. `attention` is
    the implementation, None transformers' default. `is_multimodal` takes the text model's weights
    out of a multimodal checkpoint.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # its tables of what does not fit: our errors say it
    config.transformers_weights = None  # the name of a file, which no config decides
    module, loading_info = auto_class.from_pretrained(
        checkpoint.folder,
        config=config,
        dtype=dtype,
        attn_implementation=attention,
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=ignore_mismatched_sizes,
        key_mapping=TEXT_OF_WHOLE if is_multimodal else None,
        output_loading_info=True,
    )
    return module.eval().requires_grad_(requires_grad=False).to(device), loading_info
