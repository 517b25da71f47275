"""Tiny random CLIP and SigLIP models in folders, and their vectors in transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image

from tests.engine.scripted_encoder import minilm

SEP, POSITIONS, SIDE = 102, 20, 32
_TEXT: dict[str, Any] = {
    "vocab_size": 30_522,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": POSITIONS,
}
_IMAGE = {**_TEXT, "hidden_size": 48, "num_attention_heads": 4, "image_size": SIDE, "patch_size": 8}
_CONFIGS: dict[str, dict[str, Any]] = {
    "clip": {"eos_token_id": SEP},
    "old clip": {"eos_token_id": 2},
    "siglip": {"projection_size": 48},
}
# As published: older models of CLIP have numbers where newer ones have objects.
PREPARED: dict[str, dict[str, Any]] = {
    "clip": {
        "crop_size": {"height": SIDE, "width": SIDE},
        "do_center_crop": True,
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": SIDE + 8},
    },
    "old clip": {
        "crop_size": SIDE,
        "do_center_crop": True,
        "feature_extractor_type": "CLIPFeatureExtractor",
        "resample": 3,
        "size": SIDE,
    },
    "siglip": {
        "do_convert_rgb": None,
        "image_mean": [0.5] * 3,
        "image_processor_type": "SiglipImageProcessor",
        "image_std": [0.5] * 3,
        "size": {"height": SIDE, "width": SIDE},
    },
}
PREPARED["old clip"]["image_processor_type"] = "CLIPImageProcessor"


class TinyTowers:
    """A tiny model of a kind in a folder, and transformers' class for it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        own, image = _CONFIGS[kind], {k: v for k, v in _IMAGE.items() if k in _VISION}
        torch.manual_seed(3)
        if kind == "siglip":
            config = transformers.SiglipConfig(text_config=_TEXT | own, vision_config=image)
            self.network: Any = transformers.SiglipModel(config)
        else:
            config = transformers.CLIPConfig(
                text_config=_TEXT | own, vision_config=image, projection_dim=24
            )
            self.network = transformers.CLIPModel(config)
        for name, weight in self.network.named_parameters():
            is_norm = "norm" in name and name.endswith("weight")
            torch.nn.init.normal_(weight, float(is_norm), 0.15 if weight.ndim > 1 else 0.2)
        self.network.eval().requires_grad_(requires_grad=False)
        self.network.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(PREPARED[kind]))
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            shutil.copy(minilm() / name, folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._processor: Any = None

    def texts(self, texts: Sequence[str | list[int]]) -> NDArray[np.float32]:
        """Return the vector of each text, or of the tokens of one, at length 1."""
        return self._units([self._text(text) for text in texts])

    def images(self, images: Sequence[Image.Image]) -> NDArray[np.float32]:
        """Return the vector of each image, at length 1."""
        if self._processor is None:
            processor = transformers.AutoImageProcessor
            self._processor = processor.from_pretrained(self.folder, use_fast=False)
        found = [
            self.network.get_image_features(
                **self._processor(image, do_convert_rgb=True, return_tensors="pt")
            )
            for image in images
        ]
        return self._units(found)

    def raw_text(self, text: str) -> NDArray[np.float32]:
        """Return the vector of a text as it is."""
        vector: NDArray[np.float32] = self._text(text).pooler_output[0].numpy()
        return vector

    def _text(self, text: str | list[int]) -> Any:
        ids = self.tokenizer(text)["input_ids"] if isinstance(text, str) else text
        if self.kind == "siglip":
            ids = ids + [self.tokenizer.pad_token_id] * (POSITIONS - len(ids))
        return self.network.get_text_features(torch.tensor([ids]))

    @staticmethod
    def _units(outputs: Sequence[Any]) -> NDArray[np.float32]:
        vectors = torch.cat([output.pooler_output for output in outputs])
        units: NDArray[np.float32] = torch.nn.functional.normalize(vectors, dim=-1).numpy()
        return units


_VISION = {
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("image_size", "patch_size"),
}
