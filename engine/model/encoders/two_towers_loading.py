"""Loading of CLIP and SigLIP, with a check of both towers against transformers' eager attention."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tidemill.protocol.contract import EngineError

from ...config import EngineConfig
from ...errors import ModelRefused, first_line_of
from ...kernels.backends import choose_backend
from ...scheduling.encoding import EncodingImage, EncodingRequest
from ..config.device import choose_device, choose_dtype, context_length
from ..config.hf_config import QUANTISED, UnsupportedConfig, parse_hf_config
from ..hf.pretrained import from_pretrained
from ..native import TOLERANCE, ParityResult
from ..parity.logits import is_rounding, parity_tokens, round_parameters
from ..parity_cache import parity_fact, run_once
from ..vision.preprocessor_config import TowerImages, read_tower_images
from ..weights.checkpoint import Checkpoint, find_checkpoint
from ..weights.sanity import check_not_constant
from ..weights.weights import check_stored, fill_weights, find_stored
from .encoder import Encoder
from .forward import TokenSequence, num_pages, pack_ids, run, run_images
from .image_encoder import AttentionPooler, ImageEncoder, ImageTower, image_weights
from .loaded_encoder import LoadedEncoder
from .pooler import Pooler, parts_of
from .pooling_config import PoolingConfig
from .two_towers import TwoTowers, read_two_towers
from .weight_map import head_weights, weights_of

# Tensors in checkpoints that do not affect vectors: positions, and the scale of similarities.
_IGNORED = re.compile(r"(^|\.)position_ids$|^logit_(scale|bias)$")
_NUM_IMAGES = 3


class TowerConfigs(NamedTuple):
    """The towers of a model, the images that one of them reads, and the dtype of the files."""

    towers: TwoTowers
    images: TowerImages
    stored_dtype: torch.dtype | None


def read_tower_configs(name: str, raw: Mapping[str, Any]) -> TowerConfigs:
    """Return the content of a model's configs; `ModelRefused` names what is not supported."""
    towers, hf_config = read_two_towers(name, raw), parse_hf_config(name, raw)
    if hf_config.quantization_config:
        raise ModelRefused(f"{name}: {QUANTISED}")
    try:
        images = read_tower_images(name, towers.kind, towers.patches.side)
        return TowerConfigs(towers, images, hf_config.dtype)
    except UnsupportedConfig as exc:
        raise ModelRefused(f"{name}: {exc}") from exc


def load_two_towers(settings: EngineConfig, pooling_config: PoolingConfig) -> LoadedEncoder:
    """Return the model of both towers, checked; `ModelRefused` names the reason if it fails."""
    name, raw = settings.model, pooling_config.config
    towers, images, stored_dtype = read_tower_configs(name, raw)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, stored_dtype, device)
    checkpoint = find_checkpoint(name)
    load = partial(_load, checkpoint, towers, images)
    loaded = load(dtype, device)
    fact = parity_fact(checkpoint, raw, dtype, device, repr(images.form))
    try:
        parity = run_once(fact, lambda: _check(checkpoint, raw, load, loaded, towers))
    except EngineError:
        raise
    except (TypeError, ValueError, RuntimeError) as exc:
        raise ModelRefused(f"{name}: it failed to run: {first_line_of(exc)}") from exc
    if not parity.holds:
        raise ModelRefused(
            f"{name}: its vectors differ from transformers' (relative distance "
            f"{parity.distance:.2g})."
        )
    for vectors in _vectors(loaded, towers):
        check_not_constant(name, vectors.to(dtype))
    return replace(loaded, max_model_len=context_length(settings, loaded.max_model_len))


def _load(
    checkpoint: Checkpoint,
    towers: TwoTowers,
    images: TowerImages,
    dtype: torch.dtype,
    device: torch.device,
) -> LoadedEncoder:
    """Return both towers in a dtype on a device."""
    text, image = towers.texts, towers.images
    projection = () if towers.projection is None else (towers.projection,)
    parts = {
        "text": [*weights_of(text), *head_weights(text.head)],
        "image": [*image_weights(image, towers.patches), *head_weights(projection)],
    }
    wanted = [weight for several in parts.values() for weight in several]
    stored = find_stored(checkpoint.files, wanted, base=text.names.base_model_prefix)
    check_stored(checkpoint, towers.class_name, wanted, stored, base="", ignored=_IGNORED)

    def read(part: str) -> dict[str, Tensor]:
        return fill_weights(checkpoint.name, parts[part], stored, dtype, device)

    weights = read("image")
    pooler = (
        Pooler(("cls",), parts_of(projection, weights))
        if projection
        else AttentionPooler(image, weights)
    )
    shapes = tuple(block.attention for block in image.blocks)
    tower = ImageTower(
        network=ImageEncoder(image, towers.patches, weights, images.shades),
        pooler=pooler,
        shapes=shapes,
        backend=choose_backend(shapes, dtype, device),
        dtype=dtype,
        device=device,
        form=images.form,
        num_tokens=towers.patches.num_tokens,
    )
    weights = read("text")
    shapes = tuple(block.attention for block in text.blocks)
    return LoadedEncoder(
        pooler=Pooler(("lasttoken",), parts_of(text.head, weights)),
        network=Encoder(text, weights),
        shapes=shapes,
        backend=choose_backend(shapes, dtype, device),
        dtype=dtype,
        device=device,
        vocab_size=text.vocab_size,
        num_types=0,
        max_model_len=text.max_positions,
        hidden_size=text.hidden_size,
        max_intermediate_size=text.intermediate_size,
        image_tower=tower,
        text_form=towers.text_form,
    )


def _check(
    checkpoint: Checkpoint,
    raw: Mapping[str, Any],
    load: partial[LoadedEncoder],
    loaded: LoadedEncoder,
    towers: TwoTowers,
) -> ParityResult:
    """Compare vectors in fp32 with those of transformers' class, and those of the served dtype."""
    module = _module(checkpoint, raw, loaded.device)
    expected = _eager_vectors(module, loaded, towers)
    is_exact = loaded.dtype == torch.float32
    exact = loaded if is_exact else load(torch.float32, loaded.device)
    distance = _distance(_vectors(exact, towers), expected)
    if is_exact or distance > TOLERANCE:
        return ParityResult(distance <= TOLERANCE, distance, None)
    del exact
    round_parameters(module, loaded.dtype)
    rounded = _distance(_eager_vectors(module, loaded, towers), expected)
    distance = _distance(_vectors(loaded, towers), expected)
    return ParityResult(is_rounding(distance, rounded, loaded.dtype), distance, None)


def _module(checkpoint: Checkpoint, raw: Mapping[str, Any], device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(**raw)
    module, found = from_pretrained(
        AutoModel, checkpoint, config, torch.float32, device, attention="eager"
    )
    if found["missing_keys"]:
        raise ModelRefused(f"{checkpoint.name}: its weights lack {min(found['missing_keys'])}.")
    return module


def _texts(loaded: LoadedEncoder, towers: TwoTowers) -> list[list[int]]:
    """Return tokens of texts of several lengths, in the form that the tower reads."""
    tokens = parity_tokens(loaded.vocab_size, ())[: towers.texts.max_positions].tolist()
    texts = [tokens, tokens[:1], tokens[len(tokens) // 2 :]]
    form = towers.text_form
    if form.length is not None:
        return [form.read(text, tokens[0]) for text in texts]
    end = loaded.vocab_size - 1 if form.end is None else form.end
    return [[*(token for token in text[:-1] if token != end), end] for text in texts]


def _pixels(towers: TwoTowers) -> np.ndarray:
    """Return images of noise, `[n, S, S, 3]`."""
    side = towers.patches.side
    shape = (_NUM_IMAGES, side, side, 3)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@torch.inference_mode()
def _eager_vectors(module: Any, loaded: LoadedEncoder, towers: TwoTowers) -> list[Tensor]:
    """Return transformers' vectors of the texts, each alone, and of the images."""
    dtype, tower = next(module.parameters()).dtype, loaded.image_tower
    assert tower is not None
    texts = []
    for ids in _texts(loaded, towers):
        found = module.get_text_features(torch.tensor([ids], device=loaded.device))
        texts.append(_pooled(found))
    shades = tower.network.normalised(torch.from_numpy(_pixels(towers)).to(loaded.device))
    images = _pooled(module.get_image_features(shades.to(dtype)))
    return [torch.cat(texts), images]


def _pooled(found: object) -> Tensor:
    """Return the vectors in transformers' output, which is the tensor itself before version 5."""
    pooled = getattr(found, "pooler_output", found)
    assert isinstance(pooled, Tensor)
    return pooled.float()


def _vectors(loaded: LoadedEncoder, towers: TwoTowers) -> list[Tensor]:
    """Return our vectors of the texts, and of the images, which run together."""
    tower = loaded.image_tower
    assert tower is not None
    texts = [_sequence(EncodingRequest(ids)) for ids in _texts(loaded, towers)]
    num_tokens = sum(text.num_tokens for text in texts)
    attention = loaded.attention(num_pages(loaded, num_tokens, len(texts)), len(texts))
    blank = [0] * tower.num_tokens
    images = [
        _sequence(EncodingRequest(blank, output="image", image=EncodingImage(pixels, b"")))
        for pixels in _pixels(towers)
    ]
    image_pages = num_pages(tower, len(images) * tower.num_tokens, len(images))
    return [
        run(loaded, attention, texts).float(),
        run_images(tower, tower.attention(image_pages), images).float(),
    ]


def _sequence(request: EncodingRequest) -> TokenSequence:
    return TokenSequence(request, pack_ids(request.token_ids))


def _distance(got: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative L2 distance of a vector."""
    apart = [
        torch.linalg.vector_norm(ours - theirs, dim=1)
        / torch.linalg.vector_norm(theirs, dim=1).clamp(min=1e-6)
        for ours, theirs in zip(got, expected, strict=True)
    ]
    return float(torch.cat(apart).max())
