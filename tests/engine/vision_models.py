"""Tiny random vision models of both families, and their outputs in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn

from tests.engine.families import COMMON, DELTANET, SIGMOID_EXPERTS
from tests.engine.scripted_model import pretrained_tokenizer
from tidemill.engine.model import native
from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.network.loaded_model import LoadedModel
from tidemill.engine.model.vision.preprocessor_config import read_vision_config
from tidemill.engine.model.weights.checkpoint import WHOLE, find_checkpoint
from tidemill.engine.scheduling.images import ImageSpec, PromptImage
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest

IMAGE, BEGIN, END = 300, 301, 302
SIDE = 56
TEXT: dict[str, Any] = {key: value for key, value in COMMON.items() if key != "head_dim"}
INTERLEAVED = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
INTERLEAVED |= {"mrope_interleaved": True}
TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48}
# Image preprocessing, in the format of such a model's preprocessor_config.json.
PREPARED: dict[str, dict[str, Any]] = {
    "gemma3": {
        "size": {"height": SIDE, "width": SIDE},
        "image_processor_type": "Gemma3ImageProcessor",
    },
    "qwen2_5_vl": {
        "min_pixels": SIDE**2,
        "max_pixels": 28**2 * 16,
        "image_processor_type": "Qwen2VLImageProcessor",
    },
    "qwen3_vl": {
        "size": {"shortest_edge": SIDE**2, "longest_edge": 32**2 * 16},
        "patch_size": 16,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "image_processor_type": "Qwen2VLImageProcessorFast",
    },
}
PREPARED["gemma4"] = {
    "patch_size": 4,
    "max_soft_tokens": 70,
    "do_normalize": False,
    "image_processor_type": "Gemma4ImageProcessor",
}
PREPARED["internvl"] = {
    "size": {"height": SIDE, "width": SIDE},
    "max_patches": 4,
    "image_processor_type": "GotOcr2ImageProcessorFast",
}
PREPARED["mistral3"] = {
    "size": {"longest_edge": 140},
    "patch_size": 14,
    "image_processor_type": "PixtralImageProcessor",
}
PREPARED |= dict.fromkeys(("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), PREPARED["qwen3_vl"])
PREPARED["qwen2_vl"] = PREPARED["qwen2_5_vl"]
PREPARED["glm4v"] = {  # of both frames of a patch
    "size": {"shortest_edge": 2 * SIDE**2, "longest_edge": 2 * 28**2 * 16},
    "image_processor_type": "Glm4vImageProcessor",
}
PREPARED["glm46v"] = PREPARED["glm4v"] | {"image_processor_type": "Glm46VImageProcessor"}
PREPARED["glm4v_moe"] = PREPARED["glm4v"]
PREPARED["glm_ocr"] = PREPARED["glm46v"]
PREPARED["paddleocr_vl"] = {
    "min_pixels": SIDE**2,
    "max_pixels": 28**2 * 16,
    "temporal_patch_size": 1,
    "image_processor_type": "PaddleOCRVLImageProcessor",
}


def _reader_config(kind: str, marks: dict[str, int]) -> Any:
    """Return the config of a tiny GLM-V or reader of documents."""
    import transformers

    glm_marks = {key: value for key, value in marks.items() if key.startswith(("image", "video"))}
    if kind.startswith("glm4"):
        is_moe = kind == "glm4v_moe"
        sections = {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
        parameters = {"rope_type": "default", "rope_theta": 10_000.0} | sections
        return transformers.AutoConfig.for_model(
            kind,
            text_config=(COMMON | SIGMOID_EXPERTS if is_moe else TEXT)
            | {"rope_parameters": parameters}
            | {"model_type": "glm4v_moe_text" if is_moe else "glm4v_text"},
            vision_config=TOWER | {"depth": 2, "num_heads": 2, "out_hidden_size": 64},
            **glm_marks,
        )
    if kind == "glm_ocr":
        tower = {"depth": 2, "num_heads": 2, "out_hidden_size": 64}
        rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
        return transformers.GlmOcrConfig(
            text_config=COMMON | {"rope_parameters": rope},
            vision_config=TOWER | tower,
            **glm_marks,
        )
    tower = {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    return transformers.PaddleOCRVLConfig(
        text_config=COMMON | {"rope_parameters": rope, "tie_word_embeddings": False},
        vision_config=TOWER | tower,
        tie_word_embeddings=False,
        **marks,
    )


def config_of(kind: str) -> Any:
    """Return the config of a tiny model, whose windows are shorter than an image."""
    import transformers

    if kind == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * 2
        differs = {"sliding_window": 6, "query_pre_attn_scalar": 16, "layer_types": kinds}
        tower = {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE}
        return transformers.Gemma3Config(
            text_config=COMMON | differs,
            vision_config=TOWER | tower | {"patch_size": 7, "vision_use_head": False},
            mm_tokens_per_image=16,
            image_token_index=IMAGE,
            boi_token_index=BEGIN,
            eoi_token_index=END,
        )
    if kind == "gemma4":
        kinds = ["sliding_attention", "full_attention"] * 2
        differs = {"sliding_window": 6, "layer_types": kinds, "hidden_size_per_layer_input": 0}
        differs |= {"use_bidirectional_attention": "vision", "global_head_dim": 32}
        tower = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        tower |= {"head_dim": 16, "patch_size": 4, "position_embedding_size": 300}
        return transformers.Gemma4Config(
            text_config=COMMON | differs,
            vision_config=TOWER | tower | {"standardize": True, "use_clipped_linears": True},
            image_token_id=IMAGE,
            boi_token_id=BEGIN,
            eoi_token_id=END,
        )
    if kind == "internvl":
        tower = {"num_hidden_layers": 2, "num_attention_heads": 2, "norm_type": "layer_norm"}
        return transformers.InternVLConfig(
            text_config=COMMON | {"model_type": "qwen3"},
            vision_config=TOWER | tower | {"image_size": [SIDE] * 2, "patch_size": [14] * 2},
            image_token_id=IMAGE,
            image_seq_length=4,
            tie_word_embeddings=False,
        )
    if kind == "mistral3":
        tower = {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
        return transformers.Mistral3Config(
            text_config=COMMON | {"model_type": "ministral3", "sliding_window": None},
            vision_config=TOWER | tower | {"model_type": "pixtral", "patch_size": 14},
            image_token_index=IMAGE,
            tie_word_embeddings=False,
        )
    if kind == "llava":
        tower = {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE}
        return transformers.LlavaConfig(
            text_config=COMMON | {"model_type": "llama"},
            vision_config=TOWER | tower | {"model_type": "clip_vision_model", "patch_size": 14},
            image_token_id=IMAGE,
        )
    marks = {
        "image_token_id": IMAGE,
        "video_token_id": 303,
        "vision_start_token_id": BEGIN,
        "vision_end_token_id": END,
    }
    if kind.startswith(("glm", "paddleocr")):
        return _reader_config(kind, marks)
    if kind.startswith("qwen3_vl"):
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        return transformers.AutoConfig.for_model(
            kind,
            text_config=COMMON
            | {"rope_parameters": INTERLEAVED}
            | (moe if kind == "qwen3_vl_moe" else {}),
            vision_config=TOWER
            | {"depth": 3, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 25}
            | {"deepstack_visual_indexes": [0, 1]},
            **marks,
        )
    if kind.startswith("qwen3_5"):
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        moe |= {"shared_expert_intermediate_size": 32}
        parameters = INTERLEAVED | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
        return transformers.AutoConfig.for_model(
            kind,
            text_config=COMMON
            | DELTANET
            | {"rope_parameters": parameters}
            | (moe if kind == "qwen3_5_moe" else {}),
            vision_config=TOWER
            | {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 25},
            **marks,
        )
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    if kind == "qwen2_vl":
        return transformers.Qwen2VLConfig(
            text_config=TEXT | {"rope_parameters": rope},
            vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
            **marks,
        )
    tower = {"depth": 3, "num_heads": 2, "out_hidden_size": 64, "fullatt_block_indexes": [1]}
    return transformers.Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": rope},
        vision_config=TOWER | tower | {"window_size": 56},
        **marks,
    )


def build(kind: str) -> Any:
    """Create the tiny model of a kind, with weights distributed as in `families`."""
    import transformers

    torch.manual_seed(7)
    network = transformers.AutoModelForImageTextToText.from_config(
        config_of(kind), attn_implementation="eager"
    )
    for key, parameter in network.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15)
        elif "norm" in key and key.endswith("weight"):
            is_plus_one = (kind == "gemma3" and "vision_tower" not in key) or (
                kind.startswith("qwen3_5") and "visual" not in key and "linear_attn" not in key
            )
            nn.init.normal_(parameter, 0.0 if is_plus_one else 1.0, 0.2)
        elif key.endswith("bias"):
            nn.init.normal_(parameter, std=0.2)
    for key, buffer in network.named_buffers():
        if key.endswith(("std_bias", "std_scale")):
            nn.init.normal_(buffer, float("scale" in key), 0.2)
        elif key.endswith(("_min", "_max")):
            nn.init.constant_(buffer, -1.5 if key.endswith("_min") else 1.5)
    return network.eval().requires_grad_(requires_grad=False)


def save(network: Any, folder: Path) -> None:
    """Write a model as a folder that can be served, with its image preprocessing."""
    import json

    network.save_pretrained(folder)
    if network.config.model_type == "qwen3_vl_moe":  # as published: matrices [I, O]
        weights = load_file(folder / WHOLE)
        turned = {
            key: weight.transpose(1, 2).contiguous()
            for key, weight in weights.items()
            if ".experts." in key
        }
        save_file(weights | turned, folder / WHOLE, {"format": "pt"})
    preprocessor = PREPARED.get(network.config.model_type, {})
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))


MARKS = {
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    "glm_ocr": ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>"),
    "mistral3": ("[IMG]", "[IMG_0]", "[IMG_BREAK]", "[IMG_END]"),
    "gemma4": ("<|image|>", "<|image>", "<image|>"),
    "internvl": ("<IMG_CONTEXT>", "<img>", "</img>"),
    "paddleocr_vl": ("<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"),
    "qwen2_5_vl": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
}
# They render an image as their families' templates do.
_PART = {
    "gemma3": "<start_of_image>",
    "gemma4": "<|image|>",
    "internvl": "<IMG_CONTEXT>\n",
    "glm_ocr": "<|begin_of_image|><|image|><|end_of_image|>",
    "mistral3": "[IMG]",
    "paddleocr_vl": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
}
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}IMAGE"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_with_vocabulary(network: Any, folder: Path) -> Any:
    """Write a model that supports chat; return transformers' tokenizer for it."""
    kind = network.config.model_type
    template = _TEMPLATE.replace("IMAGE", _PART[kind])
    tokenizer = pretrained_tokenizer(template)
    tokenizer.add_tokens([f"<|none {i}|>" for i in range(IMAGE - len(tokenizer))])
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS[kind])})
    first = tokenizer.convert_tokens_to_ids(list(MARKS[kind]))[:3]
    assert first == [IMAGE, BEGIN, END]
    save(network, folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def load(folder: Path, dtype: torch.dtype) -> LoadedModel:
    """Return the model in a folder, run by our decoder and its tower."""
    description = read_hf_config(str(folder))
    return native.load(
        find_checkpoint(str(folder)),
        description,
        architecture_of(description),
        dtype,
        torch.device("cpu"),
        vision=read_vision_config(description),
    )


def picture(image_spec: ImageSpec, start: int, size: tuple[int, int], seed: int) -> PromptImage:
    """Return an image of noise, `size` high and wide, at the place of a prompt's tokens."""
    height, width, rows, columns = image_spec.sizes.fit(*size)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return image_spec.prompt_image(pixels, pixels.tobytes(), start, rows, columns)


def shown_request(
    image_spec: ImageSpec,
    parts: Sequence[list[int] | tuple[tuple[int, int], int]],
    max_tokens: int,
    sampling: Sampling,
    **others: Any,
) -> SequenceRequest:
    """Return a request of texts and images; an image is given by its size and seed."""
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        size, seed = part
        shown = picture(image_spec, len(ids) + 1, size, seed)
        ids += [BEGIN, *image_spec.placeholders(shown.rows, shown.columns), END]
        images.append(shown)
    return SequenceRequest(ids, max_tokens, sampling, images=tuple(images), **others)


def inputs_of(folder: Path, request: SequenceRequest) -> dict[str, torch.Tensor]:
    """Return a request as input for transformers' class, with images from its own processor."""
    ids = torch.tensor([request.prompt_ids])
    if not request.images:
        return {"input_ids": ids}
    pixels: list[NDArray[np.uint8]] = [shown.pixels for shown in request.images]
    if "crop_to_patches" in (processor := _processor(folder)).to_dict():
        pixels = [tile for one in request.images for tile in np.split(one.pixels, one.rows)]
    inputs = dict(processor(pixels, return_tensors="pt", do_resize=False))
    for key in ("num_crops", "num_soft_tokens_per_image"):
        inputs.pop(key, None)
    if inputs.pop("num_patches", None) is not None or "image_sizes" in inputs:
        return {**inputs, "input_ids": ids}
    is_newer = {"image_grid_thw", "image_position_ids"} & inputs.keys()
    name = "mm_token_type_ids" if is_newer else "token_type_ids"
    return {**inputs, "input_ids": ids, name: (ids == IMAGE).long()}


@lru_cache(maxsize=1)
def _processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder, use_fast=False)


@torch.inference_mode()
def generated(network: Any, folder: Path, request: SequenceRequest) -> list[int]:
    """Return the greedy output of transformers' `generate`."""
    inputs = inputs_of(folder, request)
    ids = network.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=request.max_tokens,
        eos_token_id=-1,
        pad_token_id=0,
    )
    written: list[int] = ids[0, inputs["input_ids"].shape[1] :].tolist()
    return written
