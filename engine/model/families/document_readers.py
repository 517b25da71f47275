"""Families of models that read documents, as GLM-OCR: how the text half of each fills the block."""

from __future__ import annotations

from dataclasses import replace

from ..config.architecture import Architecture, WeightNames
from ..config.hf_config import ConfigFields
from ..config.rope import read_rope
from .dense import ernie4_5, glm4
from .family import DecoderSizes, Family
from .sigmoid_moe import mtp_layers


def _glm_ocr(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    architecture = glm4(fields, sizes, "consecutive")
    return replace(architecture, num_mtp_layers=mtp_layers(fields, "num_nextn_predict_layers"))


def _paddleocr_vl(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    for key in _PADDLE_WITHOUT_EFFECT:
        fields.get(key)
    rope = read_rope(
        fields, sizes.head_dim, sizes.positions, 5e5, _PADDLE_ROPES, sections="consecutive"
    )
    return ernie4_5(fields, sizes, ropes=[rope] * sizes.layers, names=WeightNames())


# They are for the vision tower and for prompts; published configs have no separate text part.
_PADDLE_WITHOUT_EFFECT = (
    *("image_token_id", "video_token_id", "vision_config"),
    *("vision_start_token_id", "vision_end_token_id"),
)
_PADDLE_ROPES = {"default": "default", "mrope": "default"}
_PADDLE = Family("PaddleOCRVLForConditionalGeneration", _paddleocr_vl, 128, {"eos_token_id": 2})
DOCUMENT_READERS = {
    "glm_ocr_text": Family("GlmOcrForConditionalGeneration", _glm_ocr),
    "paddleocr_vl": _PADDLE,
    "paddleocr_vl_text": _PADDLE,
}
