"""Towers: transformers' own modules, with the weights that a checkpoint has for them.

What a tower is given for an image is what transformers' image processor gives, to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.kernels.backends import lend_torch_the_threads
from engine.model.checkpoint import Checkpoint, check_count
from engine.model.description import Description, NotUnderstood
from engine.model.fallback import read_config
from engine.model.layout import Weight, whole
from engine.model.vision.description import Vision
from engine.model.weights import Stored, filled, missing_from, stored_in

# What checkpoints of any age call the parts of towers, and what these are called here.
_RENAMED = {
    r"^model\.(?=visual\.|vision_tower\.|multi_modal_projector\.)": "",
    r"^vision_tower\.(vision_model\.)?": "tower.",
    r"^visual\.": "tower.",
    r"^multi_modal_projector\.": "projector.",
}


def load_tower(
    checkpoint: Checkpoint,
    description: Description,
    vision: Vision,
    dtype: torch.dtype,
    device: torch.device,
) -> ImageTower:
    """Return the tower of a model that sees, whose weights were looked for."""
    wanted, stored = _weights(checkpoint, description, vision)
    tower = _TOWERS[vision.kind](read_config(description)).to(device)
    weights = filled(checkpoint.name, wanted, stored, dtype, device)
    tower.load_state_dict(weights, strict=False, assign=True)
    tower.eval().requires_grad_(requires_grad=False)
    return ImageTower(tower, vision, dtype, device)


def check_tower(checkpoint: Checkpoint, description: Description, vision: Vision) -> None:
    """Look for a tower's weights among those of a checkpoint; `NotUnderstood` says what lacks."""
    _weights(checkpoint, description, vision)


def _weights(
    checkpoint: Checkpoint, description: Description, vision: Vision
) -> tuple[list[Weight], dict[str, Stored]]:
    """Return what a tower is made of, by its own names, and where that is stored."""
    with torch.device("meta"):
        tower = _TOWERS[vision.kind](read_config(description))
    wanted = [whole(name, name, *weight.shape) for name, weight in tower.named_parameters()]
    check_count(checkpoint, sum(weight.numel() for weight in tower.parameters()))
    stored = stored_in(checkpoint.files, wanted, renamed=_RENAMED, base="tower")
    lost = missing_from(stored, wanted)
    if lost:
        raise NotUnderstood(f"the weights of its tower lack {min(lost)}")
    for weight in wanted:
        if stored[weight.role].shape != weight.shape:
            raise NotUnderstood(f"{weight.role} of its tower has another shape than it says")
    return wanted, stored


class ImageTower:
    """A `Tower` over a module: pixels as it was taught them in, vectors out."""

    def __init__(
        self, module: nn.Module, vision: Vision, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._module = module
        self._shades = torch.from_numpy(vision.shades).to(device)
        self._dtype = dtype
        self._device = device

    @torch.inference_mode()
    def look(self, pixels: NDArray[np.uint8]) -> Tensor:
        """Return an image's vectors; see `Tower.look`."""
        levels = torch.from_numpy(pixels).to(self._device).permute(2, 0, 1)  # [3, H, W]
        pairs = zip(self._shades, levels, strict=True)
        shades = torch.stack([own[level.int()] for own, level in pairs])
        with lend_torch_the_threads(self._device):
            vectors: Tensor = self._module(shades.to(self._dtype))
        return vectors


class _Squares(nn.Module):
    """The tower of Qwen2.5-VL: patches in the order of the squares that become tokens."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        said = config.vision_config
        self.tower = _network(said)
        self._patch, self._frames = said.patch_size, said.temporal_patch_size
        self._merged = said.spatial_merge_size

    def forward(self, shades: Tensor) -> Tensor:
        """Look at an image: `[3, H, W]` → `[tokens, H]`."""
        patch, merged = self._patch, self._merged
        rows, columns = (side // (patch * merged) for side in shades.shape[1:])
        patches = shades.view(-1, rows, merged, patch, columns, merged, patch)
        patches = patches.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        patches = patches.expand(-1, -1, -1, -1, -1, self._frames, -1, -1)  # one moment, held
        grid = torch.tensor([[1, rows * merged, columns * merged]], device=shades.device)
        seen = self.tower(patches.reshape(rows * columns * merged**2, -1), grid_thw=grid)
        vectors: Tensor = seen.pooler_output
        return vectors


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


_TOWERS = {"gemma3": _Projected, "qwen2_5_vl": _Squares}


def _network(config: Any) -> Any:
    from transformers import AutoModel

    return AutoModel.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
