"""Reference logits of transformers' multimodal class by eager attention."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import ModelRefused
from ...media.recording_features import recording_of
from ...scheduling.images import ImageSpec, PromptImage
from ...scheduling.prompt_audio import AudioSpec
from ..config.hf_config import HFConfig
from ..hf.dequantize import dequantised_copy
from ..hf.model import cut_layers, read_config, remove_quantization
from ..hf.pretrained import class_of, from_pretrained, from_state
from ..parity.logits import compared_rows, logits_or_none, round_parameters
from ..weights.checkpoint import Checkpoint
from ..weights.sanity import check_finite
from . import audio_encoder
from .tower import is_tower, stored_tower

# Tokens of a check before its image, and the image's approximate size.
_BEFORE, _SIZE = 8, (72, 144)
# Outputs of processors that their classes do not take.
_COUNTS = frozenset({"num_crops", "num_patches", "num_soft_tokens_per_image"})
# Seconds of a recording, an uneven number of frames.
_SECONDS = 0.61


def with_image(token_ids: Tensor, image_spec: ImageSpec | AudioSpec) -> tuple[Tensor, PromptImage]:
    """Return tokens `[t]` with an image of noise, in a size that needs no resizing.

    For a model that hears it is a recording of noise.
    """
    rng = np.random.default_rng(0)
    pixels: NDArray[Any]
    if isinstance(image_spec, AudioSpec):
        recording = recording_of(_noise(image_spec), image_spec)
        rows, columns, pixels = recording.rows, recording.columns, recording.pixels
    else:
        height, width, rows, columns = image_spec.sizes.fit(*_SIZE)
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    others = torch.where(
        token_ids == image_spec.token, token_ids[token_ids != image_spec.token][0], token_ids
    )
    image = torch.tensor(image_spec.placeholders(rows, columns))
    prompt_image = image_spec.prompt_image(pixels, b"proof", _BEFORE, rows, columns)
    return torch.cat([others[:_BEFORE], image, others[_BEFORE:]]), prompt_image


def _noise(audio_spec: AudioSpec) -> NDArray[np.float32]:
    """Return the samples of the check's recording."""
    count = int(min(_SECONDS, audio_spec.max_seconds / 2) * audio_spec.features.sampling_rate)
    return (np.random.default_rng(0).standard_normal(count) / 10).astype(np.float32)


@torch.inference_mode()
def eager_logits(
    checkpoint: Checkpoint,
    hf_config: HFConfig,
    token_ids: Tensor,
    prompt_images: Sequence[PromptImage],
    device: torch.device,
    *,
    num_layers: int | None,
    rounded_to: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return its logits `[n, V]` for `token_ids [t]` in fp32, and once more rounded to a dtype.

    The latter are None without a dtype, or if its class cannot run in it. Logits are those of the
    `compared_rows`, images are prepared by its own processor, quantised weights are dequantised.
    `num_layers` limits the run to its first layers.
    """
    module, missing = _module(checkpoint, hf_config, device, num_layers)
    if not prompt_images:  # no tower runs
        missing = {key for key in missing if not is_tower(key)}
    if missing:
        raise ModelRefused(f"{checkpoint.name}: its weights lack {min(missing)}.")
    ids = token_ids.to(device)[None]
    images: dict[str, Tensor] = {}
    if prompt_images and hf_config.raw.get("model_type") == audio_encoder.KIND:
        images = _recording(checkpoint, audio_encoder.read_audio_spec(hf_config), device)
    elif prompt_images:
        images = _images(checkpoint, len(token_ids), prompt_images, device)
    rows = torch.from_numpy(compared_rows(len(token_ids))).to(device)

    def run() -> Tensor:
        dtype = next(module.parameters()).dtype
        inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in images.items()}
        logits: Tensor = module(input_ids=ids, use_cache=False, **inputs).logits
        check_finite(checkpoint.name, logits)
        return logits[0, rows]

    exact = run()
    if rounded_to is None:
        return exact, None
    round_parameters(module, rounded_to)
    return exact, logits_or_none(run)


def _images(
    checkpoint: Checkpoint,
    num_tokens: int,
    prompt_images: Sequence[PromptImage],
    device: torch.device,
) -> dict[str, Tensor]:
    """Return the class's image inputs, by its own processor."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(
        checkpoint.folder, trust_remote_code=False, use_fast=False
    )
    pixels = [prompt_image.pixels for prompt_image in prompt_images]
    if hasattr(processor, "crop_to_patches"):
        processor.crop_to_patches = False
        pixels = [tile for one in prompt_images for tile in np.split(one.pixels, one.rows)]
    inputs = processor(pixels, do_resize=False, return_tensors="pt")
    given = inputs.keys()
    inputs = {key: value.to(device) for key, value in inputs.items() if key not in _COUNTS}
    is_image = torch.zeros(1, num_tokens, dtype=torch.long, device=device)
    for prompt_image in prompt_images:
        is_image[0, prompt_image.start : prompt_image.stop] = 1
    if {"image_grid_thw", "image_position_ids"} & given:
        inputs["mm_token_type_ids"] = is_image
    elif not {"image_sizes", "num_patches"} & given:
        inputs["token_type_ids"] = is_image
    return inputs


def _recording(
    checkpoint: Checkpoint, audio_spec: AudioSpec, device: torch.device
) -> dict[str, Tensor]:
    """Return the class's input for the recording of `with_image`, by its own feature extractor."""
    from transformers import AutoFeatureExtractor

    extractor = AutoFeatureExtractor.from_pretrained(checkpoint.folder, trust_remote_code=False)
    inputs = extractor(
        _noise(audio_spec),
        sampling_rate=audio_spec.features.sampling_rate,
        return_attention_mask=True,
        return_tensors="pt",
    )
    return {
        "input_features": inputs["input_features"].to(device),
        "feature_attention_mask": inputs["attention_mask"].to(device),
    }


def _module(
    checkpoint: Checkpoint,
    hf_config: HFConfig,
    device: torch.device,
    num_layers: int | None,
) -> tuple[Any, set[str]]:
    """Return transformers' class, and its parameters that are not stored."""
    from transformers import AutoModelForMultimodalLM

    config = read_config(hf_config)
    if num_layers is not None:
        cut_layers(config.text_config, num_layers)
        vision: Any = getattr(config, "vision_config", None)
        if getattr(vision, "deepstack_visual_indexes", None):  # each is added before one layer
            vision.deepstack_visual_indexes = vision.deepstack_visual_indexes[: num_layers - 1]
    auto_class, dtype = AutoModelForMultimodalLM, torch.float32
    if checkpoint.quantization is None:
        module, found = from_pretrained(
            auto_class, checkpoint, config, dtype, device, attention="eager"
        )
    else:
        for part in (config, config.text_config):
            remove_quantization(part)
        kind = class_of(auto_class, config)
        state = _dequantised(checkpoint, hf_config, num_layers)
        module, found = from_state(kind, config, state, dtype, device, attention="eager")
    return module, set(found["missing_keys"])


def _dequantised(
    checkpoint: Checkpoint, hf_config: HFConfig, num_layers: int | None
) -> dict[str, Tensor]:
    """Return the fp32 weights of tower and text, on the host, by the names in unquantised files."""
    text = dequantised_copy(checkpoint, hf_config, torch.device("cpu"), num_layers)
    renamed = {re.sub(r"^model\.", "model.language_model.", key): own for key, own in text.items()}
    return stored_tower(checkpoint) | renamed
