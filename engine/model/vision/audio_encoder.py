"""Audio encoder of Qwen2-Audio: recordings to the vectors of a prompt's tokens.

It is Whisper's encoder, whose positions are averaged in pairs and projected to the decoder's width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from ...errors import ModelRefused
from ...kernels.backends import torch_on_all_threads
from ...media.recording_features import FRAMES_AFTER
from ...scheduling.prompt_audio import AudioSpec, num_positions
from ..config.feature_settings import read_features
from ..config.hf_config import CONFIG, ConfigFields, HFConfig, UnsupportedConfig

KIND = "qwen2_audio"
_TOKEN = 151_646


def read_audio_spec(hf_config: HFConfig, otherwise: Mapping[str, Any] | None = None) -> AudioSpec:
    """Return the settings of a model's recordings; raises `UnsupportedConfig`.

    `otherwise` are overrides of its preprocessor config, of which none is supported.
    """
    if otherwise:
        raise UnsupportedConfig("this model has no images")
    fields = ConfigFields(f"{hf_config.name}: {CONFIG}", hf_config.raw["audio_config"])
    fields.allow("activation_function", "gelu")
    token = hf_config.raw.get("audio_token_index", hf_config.raw.get("audio_token_id", _TOKEN))
    if type(token) is not int or token < 0:
        raise UnsupportedConfig(f"it has unsupported audio_token_index {token!r}")
    mels, positions = fields.count("num_mel_bins", 128), fields.count("max_source_positions", 1500)
    try:
        return AudioSpec(token, read_features(hf_config.name, mels, positions))
    except ModelRefused as exc:
        raise UnsupportedConfig(str(exc).rstrip(".")) from exc


class AudioEncoder(nn.Module):
    """Encoder and projector of recordings, which computes no position of the silence after one."""

    def __init__(self, config: Any) -> None:
        from transformers import AutoModel
        from transformers.models.qwen2_audio.modeling_qwen2_audio import (
            Qwen2AudioMultiModalProjector,
        )

        super().__init__()
        self.tower = AutoModel.from_config(
            config.audio_config, attn_implementation="sdpa", dtype=torch.float32
        )
        self.projector = Qwen2AudioMultiModalProjector(config)

    def forward(self, features: Tensor) -> Tensor:
        """Return the vectors of a recording: `[mels, frames + FRAMES_AFTER]` → `[tokens, H]`.

        The last position before the silence reads the frames after the recording.
        """
        tower = self.tower
        count = num_positions(features.shape[1] - FRAMES_AFTER)
        x = functional.gelu(tower.conv1(features[None]))
        x = functional.gelu(tower.conv2(x))[:, :, :count].transpose(1, 2)
        x = x + tower.embed_positions.weight[:count]
        for layer in tower.layers:
            x = layer(x, None)
        x = tower.avg_pooler(x.transpose(1, 2)).transpose(1, 2)
        vectors: Tensor = self.projector(tower.layer_norm(x))[0]
        return vectors


class TransformersAudioTower:
    """A `VisionTower` over the encoder of recordings: maps features to vectors."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._module = module
        self._dtype = dtype
        self._device = device

    @torch.inference_mode()
    def encode(self, pixels: NDArray[np.float32]) -> Tensor:
        """Return a recording's vectors, `[mels, frames]` → `[tokens, H]`."""
        features = torch.from_numpy(pixels).to(self._device, self._dtype)
        with torch_on_all_threads(self._device):
            vectors: Tensor = self._module(features)
        return vectors
