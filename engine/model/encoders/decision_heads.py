"""Heads of decision models: which head a model's files describe, and its sizes.

Such a model is a decoder without its own head, next to which a file describes a head that answers
questions: the answer codes of Decision 3.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .sentence_transformers import ModelFiles, SavedFields

CODES = "decision_config.json"
READOUT = "readout.safetensors"
_BACKBONE = "Qwen3_5Model"
_ATTENTION = {"causal": True, "noncausal_full_attention": False}


@dataclass(frozen=True, slots=True)
class CodeReadout:
    """Decision 3.0: a logit of each answer code from the last token's hidden state.

    Its weights `[codes, hidden_size]` are in `readout.safetensors`. A question's options have the
    first codes; their probabilities are the softmax of the logits, divided by `temperature`. Layers
    of attention see the whole prompt unless `is_causal`.
    """

    codes: tuple[str, ...]
    hidden_size: int
    temperature: float
    is_causal: bool


def read_decision_head(raw: Mapping[str, Any], files: ModelFiles) -> CodeReadout | None:
    """Return the decision head that a model's files describe, None if there is none.

    `raw` is config.json. Raises `ModelRefused` for a head of an unknown form.
    """
    if raw.get("architectures") != [_BACKBONE] or not files.has(CODES):
        return None
    fields = files.fields(CODES)
    for key, expected in (("format_version", 1), ("prompt", "d3"), ("pooling", "last")):
        value = fields.fields.get(key, None if key == "format_version" else expected)
        if value != expected or isinstance(value, bool):
            raise fields.wrong(key)
    mode = fields.text("attention_mode", "causal")
    if mode not in _ATTENTION:
        raise fields.wrong("attention_mode")
    codes, tokens = fields.fields.get("codes"), fields.fields.get("token_ids")
    if not isinstance(codes, list) or not codes or not all(isinstance(one, str) for one in codes):
        raise fields.wrong("codes")
    if not isinstance(tokens, list) or len(tokens) != len(codes):
        raise fields.wrong("token_ids")
    temperature = fields.fields.get("temperature", 1.0)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise fields.wrong("temperature")
    if not 0 < temperature < float("inf"):
        raise fields.wrong("temperature")
    return CodeReadout(tuple(codes), _hidden_size(raw, files), temperature, _ATTENTION[mode])


def as_attending(raw: Mapping[str, Any], head: CodeReadout) -> Mapping[str, Any]:
    """Return config.json with the direction of attention that the head requires."""
    text = raw.get("text_config")
    causal = {"is_causal": head.is_causal}
    if not isinstance(text, Mapping):
        return {**raw, **causal}
    return {**raw, **causal, "text_config": {**text, **causal}}


def _hidden_size(raw: Mapping[str, Any], files: ModelFiles) -> int:
    text = raw.get("text_config")
    fields = text if isinstance(text, Mapping) else raw
    return SavedFields(files, "config.json", fields).count("hidden_size")
