"""Preprocessor config of images: resizing, normalisation, and image tokens of a prompt.

An unsupported config raises `UnsupportedConfig`: such a model is served as one of text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import first_line_of
from ...scheduling.images import Fit, ImageForm, ImageSizing, ImageSpec
from ...scheduling.prompt_audio import AudioSpec
from ...storage.hub import find_file
from ..config.hf_config import ConfigFields, HFConfig, UnsupportedConfig
from . import audio_encoder
from .soft_tokens import BUDGETS, SoftTokens
from .squares import BySquares, GlmSquares, PaddleSquares
from .tiles import Tiles

# Fields that users may override: pixels of an image, its tiles, or its tokens.
IMAGE_LIMITS = ("min_pixels", "max_pixels", "min_patches", "max_patches", "max_soft_tokens")
_PREPARATION, _PROCESSOR = "preprocessor_config.json", "processor_config.json"
# Fields that do not affect how an image is prepared.
_NAMES = (
    *("image_processor_type", "processor_class", "feature_extractor_type", "image_seq_length"),
    *("auto_map", "data_format", "default_to_square"),
)
_BILINEAR, _BICUBIC = 2, 3
_FILTERS = range(6)
_MOST_SIDE = 2**14
_MOST_TILES = 64
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]


@dataclass(frozen=True, slots=True)
class OneSize:
    """Every image has the same size, and the same number of tokens per side."""

    height: int
    width: int
    side: int

    def fit(self, height: int, width: int) -> Fit:
        """Return that size."""
        del height, width
        return Fit(self.height, self.width, self.side, self.side)


@dataclass(frozen=True, slots=True)
class LongestEdge:
    """An image keeps its shape, with sides of at most `longest`: one token per started square.

    A break follows each row.
    """

    square: int
    longest: int

    def fit(self, height: int, width: int) -> Fit:
        """Return the number of squares that cover it: transformers' size for Pixtral."""
        ratio = max(height, width) / self.longest
        if ratio > 1:
            height, width = (max(1, math.floor(side / ratio)) for side in (height, width))
        rows, columns = (-(-side // self.square) for side in (height, width))
        return Fit(rows * self.square, columns * self.square, rows, columns + 1)


@dataclass(frozen=True, slots=True)
class ShortestEdge:
    """An image keeps its shape, with a shorter side of `shortest`, before it is cropped."""

    shortest: int

    def fit(self, height: int, width: int) -> Fit:
        """Return that size: transformers' for CLIP."""
        short, long = sorted((height, width))
        longer = int(self.shortest * long / short)
        if width <= height:
            return Fit(longer, self.shortest, 1, 1)
        return Fit(self.shortest, longer, 1, 1)


class TowerImages(NamedTuple):
    """Images of a separate tower, of one size; `shades` are as in `VisionConfig`."""

    form: ImageForm
    shades: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Image preprocessing of a multimodal model, whose `model_type` is `kind`.

    `shades [3, 256]` are the levels of each channel after normalisation. A model that hears has
    the settings of recordings in their place.
    """

    kind: str
    image_spec: ImageSpec | AudioSpec
    shades: NDArray[np.float32]

    @property
    def hears(self) -> bool:
        """Return whether the model accepts recordings, not images."""
        return isinstance(self.image_spec, AudioSpec)


def read_vision_config(
    hf_config: HFConfig, otherwise: Mapping[str, Any] | None = None
) -> VisionConfig | None:
    """Return the image settings of a multimodal model; None for a text-only model.

    `otherwise` overrides the fields of its preprocessor config.
    """
    kind = str(hf_config.raw.get("model_type"))
    if kind == audio_encoder.KIND and "audio_config" in hf_config.raw:
        audio_spec = audio_encoder.read_audio_spec(hf_config, otherwise)
        return VisionConfig(kind, audio_spec, np.empty((0, 256), np.float32))
    if "vision_config" not in hf_config.raw:
        return None
    reader = _READERS.get(kind)
    if reader is None:
        raise UnsupportedConfig(f"images of {kind!r} are not supported")
    try:
        preparation = _preparation(hf_config.name)
        fields = ConfigFields(_PREPARATION, {**preparation, **(otherwise or {})})
        image_spec, shades = reader(hf_config.raw, fields)
        _close(fields, image_spec)
        return VisionConfig(kind, image_spec, shades)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as exc:
        raise UnsupportedConfig(f"its image settings contradict each other: {exc!r}") from exc


def read_tower_images(name: str, kind: str, side: int) -> TowerImages:
    """Return the images of a CLIP or SigLIP model, whose tower takes squares of `side` pixels."""
    try:
        fields = ConfigFields(_PREPARATION, _preparation(name))
        form, shades = _TOWERS[kind](fields)
        _close(fields)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as exc:
        raise UnsupportedConfig(f"its image settings contradict each other: {exc!r}") from exc
    size = form.crop or (form.sizes.height if isinstance(form.sizes, OneSize) else None)
    if size != side:
        raise UnsupportedConfig(f"{_PREPARATION} has a different image size than its tower")
    return TowerImages(form, shades)


def supported_types() -> tuple[str, ...]:
    """Return the types of models whose images are supported."""
    return tuple(_READERS)


def _preparation(name: str) -> dict[str, Any]:
    """Return the preprocessor config, from the file that transformers prefers of the two."""
    for file, part in ((_PROCESSOR, "image_processor"), (_PREPARATION, None)):
        try:
            path = find_file(name, file)
            content = None if path is None else json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as exc:
            raise UnsupportedConfig(f"{file} cannot be read: {first_line_of(exc)}") from exc
        if isinstance(content, dict) and part is not None:
            content = content.get(part)
        if isinstance(content, dict):
            return content
    raise UnsupportedConfig(f"it has no {_PREPARATION}")


def _qwen_vl(
    whole: Mapping[str, Any],
    fields: ConfigFields,
    *,
    patch_size: int = 14,
    image_token: int = 151_655,
    squares: type[BySquares] = BySquares,
    frames: int | None = None,
) -> tuple[ImageSpec, NDArray[np.float32]]:
    tower = whole["vision_config"]
    patch, merged = tower.get("patch_size", patch_size), tower.get("spatial_merge_size", 2)
    stated = fields.count("temporal_patch_size", frames or 2)
    frames = frames or tower.get("temporal_patch_size", 2)
    sizes = fields.count("patch_size", 14), fields.count("merge_size", 2)
    if (*sizes, stated) != (patch, merged, frames):
        raise UnsupportedConfig(f"{_PREPARATION} has a different patch size than its tower")
    size = fields.get("size") or {}
    counted = stated if squares.counts_frames else 1
    low, high = squares.limits
    least = fields.count("min_pixels", size.get("shortest_edge", low) // counted)
    most = fields.count("max_pixels", size.get("longest_edge", high) // counted)
    if not 0 < least <= most:
        raise UnsupportedConfig(
            f"{_PREPARATION} has invalid limits: between {least} and {most} pixels"
        )
    token = whole.get("image_token_id", image_token)
    image_spec = ImageSpec(
        mark=token,
        token=token,
        spelling=(token,),
        sizes=squares(patch * merged, least, most),
        filter=_filter(fields, _BICUBIC),
        is_bidirectional=False,
        has_axes=True,
    )
    return image_spec, _shades(fields, _CLIP_MEAN, _CLIP_STD)


def _gemma3(
    whole: Mapping[str, Any], fields: ConfigFields
) -> tuple[ImageSpec, NDArray[np.float32]]:
    tower, count = whole["vision_config"], whole.get("mm_tokens_per_image", 256)
    size, side = fields.get("size") or {"height": 224, "width": 224}, math.isqrt(count)
    sides = {size.get("height"), size.get("width"), tower.get("image_size", 224)}
    if len(sides) != 1 or not 0 < min(sides) <= _MOST_SIDE:
        raise UnsupportedConfig(f"{_PREPARATION} has a different image size than its tower")
    if side * side != count or fields.get("image_seq_length", count) != count:
        raise UnsupportedConfig(f"it has {count} tokens per image, which is not a square number")
    fields.allow("do_pan_and_scan")
    for key in ("max_num_crops", "min_crop_size", "min_ratio_to_activate"):
        fields.get(f"pan_and_scan_{key}")
    begin, end = whole.get("boi_token_index", 255_999), whole.get("eoi_token_index", 256_000)
    token = whole.get("image_token_index", whole.get("image_token_id", 262_144))
    image_spec = ImageSpec(
        mark=begin,
        token=token,
        spelling=("\n\n", begin, token, end, "\n\n"),
        sizes=OneSize(size["height"], size["width"], side),
        filter=_filter(fields, _BILINEAR),
        is_bidirectional=True,
        has_axes=False,
    )
    return image_spec, _shades(fields, [0.5] * 3, [0.5] * 3)


def _mistral3(
    whole: Mapping[str, Any], fields: ConfigFields
) -> tuple[ImageSpec, NDArray[np.float32]]:
    tower, merged = whole["vision_config"], whole.get("spatial_merge_size", 2)
    if whole.get("vision_feature_layer", -1) != -1:
        raise UnsupportedConfig("its config uses only some of the tower's layers")
    patch, longest = tower.get("patch_size", 14), (fields.get("size") or {}).get("longest_edge")
    size = fields.get("patch_size", patch)
    if isinstance(size, dict):
        size = size.get("height") if size.get("height") == size.get("width") else None
    if size not in (patch, patch * merged):
        raise UnsupportedConfig(f"{_PREPARATION} has a different patch size than its tower")
    square = patch * merged
    if type(longest) is not int or not square <= longest <= _MOST_SIDE:
        raise UnsupportedConfig(f"{_PREPARATION} has unsupported longest_edge {longest!r}")
    fields.get("do_pad")  # it is for several images in one batch
    token = whole.get("image_token_index", whole.get("image_token_id", 10))
    image_spec = ImageSpec(
        mark=token,
        token=token,
        spelling=(token,),
        sizes=LongestEdge(square, longest),
        filter=_filter(fields, _BICUBIC),
        is_bidirectional=False,
        has_axes=False,
        breaks=(token + 2, token + 3),  # as Mistral's vocabularies have them
    )
    return image_spec, _shades(fields, _CLIP_MEAN, _CLIP_STD)


def _gemma4(
    whole: Mapping[str, Any], fields: ConfigFields
) -> tuple[ImageSpec, NDArray[np.float32]]:
    tower, text = whole["vision_config"], whole["text_config"]
    sizes = tower.get("patch_size", 16), tower.get("pooling_kernel_size", 3)
    if (fields.count("patch_size", 16), fields.count("pooling_kernel_size", 3)) != sizes:
        raise UnsupportedConfig(f"{_PREPARATION} has a different patch size than its tower")
    most = fields.count("max_soft_tokens", 280)
    if most not in BUDGETS:
        raise UnsupportedConfig(
            f"{_PREPARATION} has max_soft_tokens {most}, which is none of {BUDGETS}"
        )
    fields.get("size")  # its processor ignores it
    begin, end = whole.get("boi_token_id", 255_999), whole.get("eoi_token_id", 258_882)
    token = whole.get("image_token_id", 258_880)
    image_spec = ImageSpec(
        mark=token,
        token=token,
        spelling=(begin, token, end),
        sizes=SoftTokens(math.prod(sizes), most),
        filter=_filter(fields, _BICUBIC),
        is_bidirectional=text.get("use_bidirectional_attention") == "vision",
        has_axes=False,
    )
    return image_spec, _shades(fields, [0.0] * 3, [1.0] * 3, normalizes=False)


def _internvl(
    whole: Mapping[str, Any], fields: ConfigFields
) -> tuple[ImageSpec, NDArray[np.float32]]:
    tower, ratio = whole["vision_config"], whole.get("downsample_ratio", 0.5)
    if whole.get("vision_feature_layer", -1) != -1:
        raise UnsupportedConfig("its config uses only some of the tower's layers")
    if (ratio, whole.get("vision_feature_select_strategy", "default")) != (0.5, "default"):
        raise UnsupportedConfig("its config selects unsupported features of its tower")
    size = fields.get("size") or {"height": 384, "width": 384}
    sides, patches = (
        {*pair} if isinstance(pair, list | tuple) else {pair}
        for pair in (tower.get("image_size", 448), tower.get("patch_size", 14))
    )
    sides |= {size.get("height"), size.get("width")}
    if len(sides) != 1 or not 0 < max(sides) <= _MOST_SIDE:
        raise UnsupportedConfig(f"{_PREPARATION} has a different image size than its tower")
    side, patch = max(sides), max(patches)
    if len(patches) != 1 or side % (2 * patch):
        raise UnsupportedConfig(f"its tower has unsupported patch_size {sorted(patches)!r}")
    fields.get("crop_to_patches")  # its processor always does
    fewest, most = fields.count("min_patches", 1), fields.count("max_patches", 12)
    if not fewest <= most <= _MOST_TILES:
        raise UnsupportedConfig(f"{_PREPARATION} has invalid limits: {fewest} to {most} tiles")
    token = whole.get("image_token_id", 151_667)
    tiles = Tiles(side, (side // patch // 2) ** 2, fewest, most)
    image_spec = ImageSpec(
        mark=token,
        token=token,
        spelling=("<img>", token, "</img>"),
        sizes=tiles,
        filter=_filter(fields, _BICUBIC),
        is_bidirectional=False,
        has_axes=False,
        tiling=tiles,
    )
    return image_spec, _shades(fields, _CLIP_MEAN, _CLIP_STD)


def _clip(fields: ConfigFields) -> tuple[ImageForm, NDArray[np.float32]]:
    return _squares(fields, {"shortest_edge": 224}, 224), _shades(fields, _CLIP_MEAN, _CLIP_STD)


def _siglip(fields: ConfigFields) -> tuple[ImageForm, NDArray[np.float32]]:
    default = {"height": 224, "width": 224}
    return _squares(fields, default, None), _shades(fields, [0.5] * 3, [0.5] * 3)


def _squares(
    fields: ConfigFields, default: Mapping[str, int], default_crop: int | None
) -> ImageForm:
    """Return the form of images that become squares: resized to one, or cropped to one."""
    size, crop = fields.get("size", default), fields.get("crop_size", default_crop)
    size = {"shortest_edge": size} if type(size) is int else size
    crop = {"height": crop, "width": crop} if type(crop) is int else crop
    is_cropped = fields.flag("do_center_crop", default=default_crop is not None)
    sides: dict[str, Any] = {**size}
    if not all(type(side) is int and 0 < side <= _MOST_SIDE for side in sides.values()):
        raise UnsupportedConfig(f"{_PREPARATION} has unsupported size {size!r}")
    height, width = sides.get("height"), sides.get("width")
    least = sides.get("shortest_edge", min(height or 0, width or 0))
    sizes: ImageSizing = ShortestEdge(least)
    if sides.keys() == {"height", "width"} and height == width:
        sizes = OneSize(least, least, 1)
    elif sides.keys() != {"shortest_edge"} or not is_cropped:
        raise UnsupportedConfig(f"{_PREPARATION} has unsupported size {size!r}")
    filter_ = _filter(fields, _BICUBIC)
    if not is_cropped:
        return ImageForm(sizes, filter_)
    side = crop.get("height")
    if side != crop.get("width") or type(side) is not int or not 0 < side <= least:
        raise UnsupportedConfig(f"{_PREPARATION} has unsupported crop_size {crop!r}")
    return ImageForm(sizes, filter_, side)


def _close(fields: ConfigFields, image_spec: ImageSpec | None = None) -> None:
    """Refuse to understand images if a field of their preparation was not used."""
    for key in _NAMES:
        fields.get(key)
    for key in ("do_resize", "do_rescale", "do_convert_rgb"):
        if not fields.flag(key, default=True):
            raise UnsupportedConfig(f"{_PREPARATION} has unsupported {key} false")
    fields.check_all_read()
    if image_spec is None:
        return
    tokens = [one for one in (image_spec.mark, *image_spec.spelling) if not isinstance(one, str)]
    if not all(type(one) is int and one >= 0 for one in tokens):
        raise UnsupportedConfig(f"it has unsupported image tokens {tokens!r}")


def _filter(fields: ConfigFields, default: int) -> int:
    number = fields.get("resample", default)
    if number not in _FILTERS:
        raise UnsupportedConfig(f"{_PREPARATION} has unsupported resample {number!r}")
    return int(number)


def _shades(
    fields: ConfigFields, mean: list[float], std: list[float], *, normalizes: bool = True
) -> NDArray[np.float32]:
    """Return each level of each channel, in transformers' order of operations and types."""
    mean, std = fields.get("image_mean", mean), fields.get("image_std", std)
    if not fields.flag("do_normalize", default=normalizes):
        mean, std = [0.0] * 3, [1.0] * 3
    scale = fields.number("rescale_factor", 1 / 255)
    means, stds = np.array(mean, np.float32), np.array(std, np.float32)
    if not means.shape == stds.shape == (3,) or not np.isfinite(means).all() or not stds.all():
        raise UnsupportedConfig(
            f"{_PREPARATION} has unsupported image_mean {mean!r}, image_std {std!r}"
        )
    levels = (np.arange(256, dtype=np.float64) * scale).astype(np.float32)
    return (levels - means[:, None]) / stds[:, None]


_GLM = partial(_qwen_vl, image_token=151_343, squares=GlmSquares)
_PADDLE = partial(_qwen_vl, image_token=100_295, squares=PaddleSquares, frames=1)
_TOWERS = {"clip": _clip, "siglip": _siglip}
_Reader = Callable[[Mapping[str, Any], ConfigFields], tuple[ImageSpec, NDArray[np.float32]]]
_READERS: dict[str, _Reader] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "internvl": _internvl,
    "glm46v": _GLM,
    "glm4v": _GLM,
    "glm4v_moe": partial(_GLM, image_token=151_363),
    "glm_ocr": partial(_GLM, image_token=59_280),
    "mistral3": _mistral3,
    "paddleocr_vl": _PADDLE,
    "qwen2_vl": _qwen_vl,
    "qwen2_5_vl": _qwen_vl,
    "qwen3_vl": partial(_qwen_vl, patch_size=16),
    "qwen3_vl_moe": partial(_qwen_vl, patch_size=16),
    "qwen3_5": partial(_qwen_vl, patch_size=16, image_token=248_056),
    "qwen3_5_moe": partial(_qwen_vl, patch_size=16, image_token=248_056),
}
