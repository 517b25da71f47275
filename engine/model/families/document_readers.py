"""Families of models that read documents, as GLM-OCR: how the text half of each fills the block."""

from __future__ import annotations

from dataclasses import replace

from ..config.architecture import Architecture
from ..config.hf_config import ConfigFields
from .dense import glm4
from .family import DecoderSizes, Family
from .moe import mtp_layers


def _glm_ocr(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    architecture = glm4(fields, sizes, "consecutive")
    return replace(architecture, num_mtp_layers=mtp_layers(fields, "num_nextn_predict_layers"))


DOCUMENT_READERS = {
    "glm_ocr_text": Family("GlmOcrForConditionalGeneration", _glm_ocr),
}
