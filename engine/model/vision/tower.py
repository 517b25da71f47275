"""Vision and audio encoders (towers): transformers' modules, with a checkpoint's weights.

A tower's input is bit-identical to the output of transformers' image processor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...kernels.backends import torch_on_all_threads
from ..config.hf_config import HFConfig, UnsupportedConfig
from ..hf.model import read_config
from ..weights.checkpoint import FLOATS, Checkpoint, check_count
from ..weights.quantised.loading import names_of, plan_loading
from ..weights.weight_parts import Weight, whole
from ..weights.weights import StoredTensor, fill_weights, find_stored, missing_from
from .audio_encoder import KIND, AudioEncoder, TransformersAudioTower
from .preprocessor_config import VisionConfig

# Old and new names of towers' parts in checkpoints, and their names here.
_RENAMED = {
    r"^model\.(?=visual\.|vision_tower\.|audio_tower\.|multi_modal_projector\.|embed_vision\.)": "",
    r"^embed_vision\.": "projector.",
    r"^vision_tower\.(vision_model\.)?": "tower.",
    r"^visual\.": "tower.",
    r"^audio_tower\.": "tower.",
    r"^multi_modal_projector\.": "projector.",
    r"^(model\.projector|mlp_AR)\.": "projector.",
}


def load_tower(
    checkpoint: Checkpoint,
    hf_config: HFConfig,
    vision: VisionConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> TransformersVisionTower | TransformersAudioTower:
    """Return the tower of a multimodal model, whose weights were found before."""
    wanted, stored = _weights(checkpoint, hf_config, vision)
    tower = _TOWERS[vision.kind](read_config(hf_config)).to(device)
    weights = fill_weights(checkpoint.name, wanted, stored, dtype, device)
    tower.load_state_dict(weights, strict=False, assign=True)
    tower.eval().requires_grad_(requires_grad=False)
    if vision.hears:
        return TransformersAudioTower(tower, dtype, device)
    return TransformersVisionTower(tower, vision, dtype, device)


def stored_tower(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return a tower's unquantised weights in fp32, on the host, by the names in its files."""
    stored = find_stored(checkpoint.files, ())
    wanted = [
        whole(key, key, *tensor.shape)
        for key, tensor in stored.items()
        if tensor.kind in FLOATS and is_tower(key)
    ]
    return fill_weights(checkpoint.name, wanted, stored, torch.float32, torch.device("cpu"))


def check_tower(checkpoint: Checkpoint, hf_config: HFConfig, vision: VisionConfig) -> int:
    """Return a tower's number of weights.

    Raises `UnsupportedConfig` unless its checkpoint has all of them, and has them unquantised.
    """
    wanted, _ = _weights(checkpoint, hf_config, vision)
    return sum(prod(weight.shape) for weight in wanted)


def _weights(
    checkpoint: Checkpoint, hf_config: HFConfig, vision: VisionConfig
) -> tuple[list[Weight], dict[str, StoredTensor]]:
    """Return a tower's weights by its own names, and where they are stored."""
    with torch.device("meta"):
        tower = _TOWERS[vision.kind](read_config(hf_config))
    # Buffers of some towers are weights, too.
    wanted = [whole(name, name, *weight.shape) for name, weight in tower.state_dict().items()]
    check_count(checkpoint, sum(weight.numel() for weight in tower.parameters()))
    names = names_of(checkpoint.quantization, wanted)
    stored = find_stored(checkpoint.files, wanted, *names, renamed=_RENAMED, base="tower")
    part = "audio encoder" if vision.hears else "vision tower"
    _check_unquantised(checkpoint, wanted, stored, part)
    lost = missing_from(stored, wanted)
    if lost:
        raise UnsupportedConfig(f"its {part} lacks the weights {min(lost)}")
    for weight in wanted:
        if stored[weight.role].shape != weight.shape:
            raise UnsupportedConfig(
                f"{weight.role} of its {part} does not have the shape in its config"
            )
    return wanted, stored


def _check_unquantised(
    checkpoint: Checkpoint,
    wanted: Sequence[Weight],
    stored: Mapping[str, StoredTensor],
    part: str,
) -> None:
    """Refuse to understand a tower of quantised weights: its modules support only plain ones."""
    plan = plan_loading(checkpoint.name, checkpoint.quantization, wanted, stored)
    keys = {own.role for own in plan.tensors()} | {weight.role for weight in wanted}
    quantised = [stored[key] for key in keys & stored.keys() if stored[key].kind not in FLOATS]
    if quantised:
        places = {(tensor.file, tensor.start) for tensor in quantised}
        as_stored = find_stored(checkpoint.files, ()).items()
        key = min(key for key, tensor in as_stored if (tensor.file, tensor.start) in places)
        raise UnsupportedConfig(f"{key} of its {part} is quantised")


def is_tower(key: str) -> bool:
    """Return whether a name in files of any age is one of a tower's."""
    for pattern, name in _RENAMED.items():
        key = re.sub(pattern, name, key)
    return key.startswith(("tower.", "projector."))


class TransformersVisionTower:
    """A `VisionTower` over a module: maps normalised pixels to vectors."""

    def __init__(
        self, module: nn.Module, vision: VisionConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._module = module
        self._shades = torch.from_numpy(vision.shades).to(device)
        self._dtype = dtype
        self._device = device

    @torch.inference_mode()
    def encode(self, pixels: NDArray[np.uint8]) -> Tensor:
        """Return an image's vectors; see `VisionTower.look`."""
        levels = torch.from_numpy(pixels).to(self._device).permute(2, 0, 1)  # [3, H, W]
        pairs = zip(self._shades, levels, strict=True)
        shades = torch.stack([own[level.int()] for own, level in pairs])
        with torch_on_all_threads(self._device):
            vectors: Tensor = self._module(shades.to(self._dtype))
        return vectors


class _Squares(nn.Module):
    """The tower of Qwen-VL: patches in the order of the squares that become tokens.

    Qwen3-VL's also gives each token vectors for the first layers (DeepStack).
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        vision_config = config.vision_config
        self.tower = (
            _qwen2_network(vision_config)
            if vision_config.model_type in _QWEN2
            else _network(vision_config)
        )
        self._patch, self._frames = vision_config.patch_size, vision_config.temporal_patch_size
        self._merged = vision_config.spatial_merge_size

    def forward(self, shades: Tensor) -> Tensor:
        """Look at an image: `[3, H, W]` → `[tokens, H]`, or with D deeper vectors `(1 + D) · H`."""
        patch, merged = self._patch, self._merged
        rows, columns = (side // (patch * merged) for side in shades.shape[1:])
        patches = shades.view(-1, rows, merged, patch, columns, merged, patch)
        patches = patches.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        patches = patches.expand(
            -1, -1, -1, -1, -1, self._frames, -1, -1
        )  # a single frame, repeated
        grid = torch.tensor([[1, rows * merged, columns * merged]], device=shades.device)
        seen = self.tower(patches.reshape(rows * columns * merged**2, -1), grid_thw=grid)
        return torch.cat([seen.pooler_output, *getattr(seen, "deepstack_features", ())], dim=1)


class _Projected(nn.Module):
    """The tower of Gemma 3: SigLIP's, pooled and projected to tokens."""

    def __init__(self, config: Any) -> None:
        from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

        super().__init__()
        self.tower = _network(config.vision_config)
        self.projector = Gemma3MultiModalProjector(config)

    def forward(self, shades: Tensor) -> Tensor:
        """Look at an image: `[3, H, W]` → `[tokens, H]`."""
        seen = self.tower(pixel_values=shades[None])
        vectors: Tensor = self.projector(seen.last_hidden_state)[0]
        return vectors


class _Pooled(nn.Module):
    """The tower of Gemma 4: patches, pooled by squares to tokens."""

    def __init__(self, config: Any) -> None:
        from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder

        super().__init__()
        self.tower = _network(config.vision_config)
        self.projector = Gemma4MultimodalEmbedder(config.vision_config, config.text_config)
        self._patch = config.vision_config.patch_size

    def forward(self, shades: Tensor) -> Tensor:
        """Look at an image: `[3, H, W]` → `[tokens, H]`."""
        patch = self._patch
        rows, columns = (side // patch for side in shades.shape[1:])
        patches = shades.view(3, rows, patch, columns, patch).permute(1, 3, 2, 4, 0)
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)  # x, y
        seen = self.tower(
            pixel_values=patches.reshape(1, rows * columns, -1),
            pixel_position_ids=places[None].to(shades.device),
        )
        vectors: Tensor = self.projector(seen.last_hidden_state)
        return vectors


class _Shuffled(nn.Module):
    """The tower of InternVL: a tile's patches by four, projected to tokens."""

    def __init__(self, config: Any) -> None:
        from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector

        super().__init__()
        self.tower = _network(config.vision_config)
        self.projector = InternVLMultiModalProjector(config)

    def forward(self, shades: Tensor) -> Tensor:
        """Look at a column of tiles: `[3, tiles · S, S]` → `[tiles · tokens, H]`."""
        side = shades.shape[2]
        tiles = shades.view(3, -1, side, side).transpose(0, 1)
        seen = self.tower(pixel_values=tiles).last_hidden_state[:, 1:]  # without the class token
        half = math.isqrt(seen.shape[1]) // 2
        squares = seen.view(len(tiles), half, 2, half, 2, -1).transpose(2, 3)
        vectors: Tensor = self.projector(squares.reshape(len(tiles) * half**2, -1))
        return vectors


class _Merged(nn.Module):
    """The tower of Mistral 3: Pixtral's, its patches merged to tokens."""

    def __init__(self, config: Any) -> None:
        from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector

        super().__init__()
        self.tower = _network(config.vision_config)
        self.projector = Mistral3MultiModalProjector(config)

    def forward(self, shades: Tensor) -> Tensor:
        """Look at an image: `[3, H, W]` → `[tokens, H]`."""
        sizes = [tuple(shades.shape[1:])]
        seen = self.tower(pixel_values=shades[None], image_sizes=sizes)
        vectors: Tensor = self.projector(seen.last_hidden_state[0], sizes)
        return vectors


class _ProjectedSquares(nn.Module):
    """The tower of PaddleOCR-VL: its patches are merged to tokens after all layers."""

    def __init__(self, config: Any) -> None:
        from transformers.models.paddleocr_vl.modeling_paddleocr_vl import (
            PaddleOCRProjector,
            PaddleOCRVisionModel,
        )

        super().__init__()
        vision_config = config.vision_config
        self.tower = PaddleOCRVisionModel(vision_config)
        self.projector = PaddleOCRProjector(config)
        self._patch = vision_config.patch_size

    def forward(self, shades: Tensor) -> Tensor:
        """Look at an image: `[3, H, W]` → `[tokens, H]`."""
        patch = self._patch
        rows, columns = (side // patch for side in shades.shape[1:])
        patches = shades.view(-1, rows, patch, columns, patch).permute(1, 3, 0, 2, 4)
        grid = torch.tensor([[1, rows, columns]], device=shades.device)
        seen = self.tower(patches.reshape(1, rows * columns, -1, patch, patch), grid_thw=grid)
        vectors: Tensor = self.projector(seen.last_hidden_state, grid)
        return vectors


_TOWERS = {
    "gemma3": _Projected,
    "gemma4": _Pooled,
    "internvl": _Shuffled,
    "glm46v": _Squares,
    "glm4v": _Squares,
    "glm4v_moe": _Squares,
    "glm_ocr": _Squares,
    "mistral3": _Merged,
    "paddleocr_vl": _ProjectedSquares,
    KIND: AudioEncoder,
    "qwen2_vl": _Squares,
    "qwen2_5_vl": _Squares,
    "qwen3_vl": _Squares,
    "qwen3_vl_moe": _Squares,
    "qwen3_5": _Squares,
    "qwen3_5_moe": _Squares,
}


_QWEN2 = {"qwen2_vl", "qwen2_vl_vision"}


def _qwen2_network(config: Any) -> Any:
    """Return the tower of Qwen2-VL, which transformers does not find by its config."""
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    return Qwen2VisionTransformerPretrainedModel(config)


def _network(config: Any) -> Any:
    from transformers import AutoModel

    return AutoModel.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
