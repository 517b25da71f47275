"""Heads of decision models: which head a model's files describe, and its sizes.

Such a model is a decoder or an encoder, next to which a file describes a head that answers
questions: the answer codes of Decision 3.0, the joint schema head of Clef, or the option markers of
Laya and Julia.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tidemill.protocol.decisions.questions import MAX_OPTIONS

from ...storage.hub import NESTED, unpacked_folder
from .sentence_transformers import ModelFiles, SavedFields

CODES = "decision_config.json"
READOUT = "readout.safetensors"
JOINT, JOINT_WEIGHTS = "joint_head_config.json", "joint_head.safetensors"
LAYA, JULIA = NESTED
_POLICY = "inference-policy.json"
# The network that each head is for: a class, or the encoder's `model_type`.
_NETWORKS = {
    CODES: "Qwen3_5Model",
    JOINT: "Qwen3_5ForConditionalGeneration",
    LAYA: "modernbert",
    JULIA: "modernbert",
}
MARKER_KINDS = ("choice", "score", "noul")
"""The kinds of questions of Laya and Julia, in the order of their embeddings."""
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


@dataclass(frozen=True, slots=True)
class MarkerHead:
    """Laya and Julia: a logit of each option from the state of the mask token before it.

    A question has at most `max_tokens` with its input, and `max_question_tokens` alone.
    `temperatures` divide the logits, by the kind of question or by kind and number of options.
    Unless `names_options` the model sees only the descriptions of options.
    """

    num_layers: int
    max_tokens: int
    max_question_tokens: int
    temperatures: Mapping[str, float]
    max_options: int
    names_options: bool


DecisionHead = CodeReadout | JointHead | MarkerHead


def has_decision_head(raw: Mapping[str, Any], files: ModelFiles) -> bool:
    """Return whether a model's files describe a decision head; `raw` is config.json."""
    return _head_file(raw, files) is not None


def read_decision_head(raw: Mapping[str, Any], files: ModelFiles) -> DecisionHead | None:
    """Return the decision head that a model's files describe, None if there is none.

    `raw` is config.json. Raises `ModelRefused` for a head of an unknown form.
    """
    file = _head_file(raw, files)
    if file is None:
        return None
    network = raw.get("model_type") if file in NESTED else _class_of(raw)
    if network != _NETWORKS[file]:
        raise files.refusal(
            f"it has a decision head ({file}) on {network}; only {_NETWORKS[file]} is supported. "
            "To leave the head out, pass `--runner generate` or `--convert embed`."
        )
    return _READERS[file](raw, files)


def _head_file(raw: Mapping[str, Any], files: ModelFiles) -> str | None:
    """Return the file that describes a model's decision head.

    Files of a hub id are queried only where its config.json suggests a head.
    """
    config = files.find("config.json")
    if config is not None and config.parent.name == "encoder":
        return next((name for name in NESTED if files.has(name)), None)
    is_local = unpacked_folder(files.model) is not None
    named = (CODES, JOINT)
    return next(
        (
            name
            for name in named
            if (is_local or _class_of(raw) == _NETWORKS[name]) and files.has(name)
        ),
        None,
    )


def _class_of(raw: Mapping[str, Any]) -> str:
    architectures = raw.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else ""


def _joint_head(raw: Mapping[str, Any], files: ModelFiles) -> JointHead:
    sizes = files.fields(JOINT)
    names = [field.name for field in fields(JointHead)]
    sizes.only(*names)
    head = JointHead(**{name: sizes.count(name) for name in names})
    if head.hidden_size != _hidden_size(raw, files):
        raise sizes.wrong("hidden_size")
    if head.width % head.heads:
        raise sizes.wrong("heads")
    return head


def _laya(raw: Mapping[str, Any], files: ModelFiles) -> MarkerHead:
    del raw
    config = files.fields(LAYA)
    if config.text("option_layout", "sequential") != "sequential":
        raise config.wrong("option_layout")
    listed = config.fields.get("temperature", [1.0] * len(MARKER_KINDS))
    if not isinstance(listed, list) or len(listed) != len(MARKER_KINDS):
        raise config.wrong("temperature")
    temperatures = dict(zip(MARKER_KINDS, listed, strict=True))
    temperatures |= config.object("temperature_by_options")
    return MarkerHead(
        num_layers=config.optional_count("head_layers") or 2,
        max_tokens=config.optional_count("max_len") or 512,
        max_question_tokens=config.optional_count("head_max_len") or 192,
        temperatures={key: _usable(value) for key, value in temperatures.items()},
        max_options=MAX_OPTIONS,
        names_options=True,
    )


def _julia(raw: Mapping[str, Any], files: ModelFiles) -> MarkerHead:
    config, policy = files.fields(JULIA), files.fields(_POLICY)
    if config.count("format_version") != 1:
        raise config.wrong("format_version")
    positions = SavedFields(files, "encoder/config.json", raw).count("max_position_embeddings")
    return MarkerHead(
        num_layers=config.count("head_layers"),
        max_tokens=min(positions, policy.optional_count("max_length") or positions),
        max_question_tokens=policy.optional_count("head_length") or 512,
        temperatures={},
        max_options=20,
        names_options=False,
    )


def _usable(temperature: object) -> float:
    """Return a temperature within the limits of Laya's runtime; 1 if it is not a number."""
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        return 1.0
    return min(5.0, max(0.5, temperature)) if math.isfinite(temperature) else 1.0


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


_READERS: dict[str, Callable[[Mapping[str, Any], ModelFiles], DecisionHead]] = {
    CODES: _code_readout,
    JOINT: _joint_head,
    LAYA: _laya,
    JULIA: _julia,
}
