"""What transformers' whole class of a model that sees answers: text, tower and all between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.errors import ModelRefused
from engine.model.checkpoint import Checkpoint
from engine.model.description import Description
from engine.model.fallback import read_config
from engine.model.sanity import refuse_infinite
from engine.scheduling.pictures import Picture, Sight

# Their text alone is no class of transformers'.
WHOLE_ONLY = {"qwen2_5_vl", "qwen2_5_vl_text"}
# So many tokens of a proof come before its image, which is about of this size.
_BEFORE, _SIZE = 8, (72, 120)


def with_picture(token_ids: Tensor, sight: Sight) -> tuple[Tensor, Picture]:
    """Return tokens `[t]` with an image among them, of noise in a size that nothing changes."""
    height, width, rows, columns = sight.sizes.fit(*_SIZE)
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    others = torch.where(
        token_ids == sight.token, token_ids[token_ids != sight.token][0], token_ids
    )
    image = torch.full((rows * columns,), sight.token)
    picture = Picture(pixels, b"proof", _BEFORE, rows, columns, sight.sees_whole)
    return torch.cat([others[:_BEFORE], image, others[_BEFORE:]]), picture


@torch.inference_mode()
def answer(
    checkpoint: Checkpoint,
    description: Description,
    token_ids: Tensor,
    pictures: Sequence[Picture],
    device: torch.device,
    *,
    num_layers: int | None,
) -> Tensor:
    """Return what it answers in fp32 by eager attention: `token_ids [t]` → logits `[t, V]`.

    Images are prepared by its own processor. `num_layers` takes so many of its first layers.
    """
    from transformers import AutoImageProcessor

    module = _module(checkpoint, description, device, num_layers)
    inputs: dict[str, Tensor] = {}
    if pictures:
        processor = AutoImageProcessor.from_pretrained(
            checkpoint.folder, trust_remote_code=False, use_fast=False
        )
        inputs = processor([picture.pixels for picture in pictures], return_tensors="pt")
        inputs = {key: value.to(device) for key, value in inputs.items() if key != "num_crops"}
        is_image = torch.zeros(1, len(token_ids), dtype=torch.long, device=device)
        for picture in pictures:
            is_image[0, picture.start : picture.stop] = 1
        has_grid = "image_grid_thw" in inputs
        inputs["mm_token_type_ids" if has_grid else "token_type_ids"] = is_image
    logits: Tensor = module(input_ids=token_ids.to(device)[None], use_cache=False, **inputs).logits
    refuse_infinite(checkpoint.name, logits)
    return logits[0]


def _module(
    checkpoint: Checkpoint,
    description: Description,
    device: torch.device,
    num_layers: int | None,
) -> Any:
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    config = read_config(description)
    config.transformers_weights = None  # the name of a file, which no config decides
    if num_layers is not None:
        text = config.text_config
        text.num_hidden_layers = num_layers
        text.layer_types = text.layer_types[:num_layers]
    module, found = AutoModelForImageTextToText.from_pretrained(
        checkpoint.folder,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    if found["missing_keys"]:
        raise ModelRefused(f"{checkpoint.name}: its weights lack {min(found['missing_keys'])}.")
    return module.eval().requires_grad_(requires_grad=False).to(device)
