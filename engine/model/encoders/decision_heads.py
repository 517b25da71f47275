"""Heads of decision models: which head a model's files describe, and its sizes.

Such a model is a decoder, next to which a file describes a head that answers questions: the answer
codes of Decision 3.0, or the joint schema head of Clef.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .sentence_transformers import ModelFiles, SavedFields

CODES = "decision_config.json"
READOUT = "readout.safetensors"
JOINT, JOINT_WEIGHTS = "joint_head_config.json", "joint_head.safetensors"
_FILE_OF = {"Qwen3_5Model": CODES, "Qwen3_5ForConditionalGeneration": JOINT}
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


@dataclass(frozen=True, slots=True)
class JointHead:
    """Clef: the sizes of a head that scores all options of all questions in one pass.

    Its weights are in `joint_head.safetensors`.
    """

    hidden_size: int
    width: int
    routing_layers: int
    layers: int
    heads: int
    feedforward: int


DecisionHead = CodeReadout | JointHead


def has_decision_head(raw: Mapping[str, Any], files: ModelFiles) -> bool:
    """Return whether a model's files describe a decision head; `raw` is config.json."""
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        return False
    file = _FILE_OF.get(str(architectures[0]))
    return file is not None and files.has(file)


def read_decision_head(raw: Mapping[str, Any], files: ModelFiles) -> DecisionHead | None:
    """Return the decision head that a model's files describe, None if there is none.

    `raw` is config.json. Raises `ModelRefused` for a head of an unknown form.
    """
    if not has_decision_head(raw, files):
        return None
    if raw["architectures"] == ["Qwen3_5Model"]:
        return _code_readout(raw, files)
    sizes = files.fields(JOINT)
    names = [field.name for field in fields(JointHead)]
    sizes.only(*names)
    head = JointHead(**{name: sizes.count(name) for name in names})
    if head.hidden_size != _hidden_size(raw, files):
        raise sizes.wrong("hidden_size")
    if head.width % head.heads:
        raise sizes.wrong("heads")
    return head


def _code_readout(raw: Mapping[str, Any], files: ModelFiles) -> CodeReadout:
    config = files.fields(CODES)
    for key, expected in (("format_version", 1), ("prompt", "d3"), ("pooling", "last")):
        value = config.fields.get(key, None if key == "format_version" else expected)
        if value != expected or isinstance(value, bool):
            raise config.wrong(key)
    mode = config.text("attention_mode", "causal")
    if mode not in _ATTENTION:
        raise config.wrong("attention_mode")
    codes, tokens = config.fields.get("codes"), config.fields.get("token_ids")
    if not isinstance(codes, list) or not codes or not all(isinstance(one, str) for one in codes):
        raise config.wrong("codes")
    if not isinstance(tokens, list) or len(tokens) != len(codes):
        raise config.wrong("token_ids")
    temperature = config.fields.get("temperature", 1.0)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise config.wrong("temperature")
    if not 0 < temperature < float("inf"):
        raise config.wrong("temperature")
    return CodeReadout(tuple(codes), _hidden_size(raw, files), temperature, _ATTENTION[mode])


def as_attending(raw: Mapping[str, Any], head: DecisionHead) -> Mapping[str, Any]:
    """Return config.json with the direction of attention that the head requires."""
    if not isinstance(head, CodeReadout):
        return raw
    text = raw.get("text_config")
    causal = {"is_causal": head.is_causal}
    if not isinstance(text, Mapping):
        return {**raw, **causal}
    return {**raw, **causal, "text_config": {**text, **causal}}


def _hidden_size(raw: Mapping[str, Any], files: ModelFiles) -> int:
    text = raw.get("text_config")
    own = text if isinstance(text, Mapping) else raw
    return SavedFields(files, "config.json", own).count("hidden_size")
