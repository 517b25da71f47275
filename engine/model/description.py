"""A model's config.json, read as plain JSON: no library that models need is loaded for it.

A field counts as understood once it is taken. What nobody took and what changes how a model
computes must never be ignored: such a model is left to transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch

from engine.errors import ModelRefused, first_line_of
from engine.files import find_file

CONFIG = "config.json"
# The deepest models have some 130.
MAX_LAYERS = 1_000
STORED_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")
}
QUANTISED = (
    "its weights are quantised, which is supported of models that write text and that the engine's "
    "own decoder runs; use the unquantised model."
)
# Whatever runs it, a model of other than so many whole ones is none.
COUNTS = (
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "hidden_size",
    "max_position_embeddings",
)
TIE = "tie_word_embeddings"
# Which text model a model of text and images has where it does not say.
TEXT_OF_KIND = {"gemma3": "gemma3_text", "llava": "llama"}
# What says nothing of a forward pass: names, training, sampling, tokens, where it came from; and
# how weights are stored, which `Description.quantisation` tells.
_SILENT = frozenset(
    """
    _attn_implementation_autoset _name_or_path architectures auto_map bad_words_ids
    begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label initializer_factor initializer_range
    label2id length_penalty max_length max_sequence_length min_length model_type name_or_path
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_router_logits output_scores pad_token_id prefix pretraining_tp
    problem_type quantization_config repetition_penalty return_dict return_dict_in_generate
    router_aux_loss_coef router_jitter_noise sep_token_id suppress_tokens task_specific_params
    temperature tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    transformers_weights typical_p unsloth_fixed unsloth_version use_cache use_return_dict
    """.split()
)


_SILENT_ENDS = ("dropout", "dropout_prob", "_pdrop")


class NotUnderstood(Exception):
    """What a config says that nobody here knows how to compute; transformers may."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a config.json says of the model whose text is served.

    `fields` are those of the text model, which `is_part` of the `whole` or all of it; `kind` is its
    `model_type`, `said_dtype` that of the stored weights as it is told, `quantisation` what is said
    of how they are quantised. `is_overridden` where `--hf-overrides` say part of it.
    """

    name: str
    kind: str
    fields: Mapping[str, Any]
    is_part: bool
    said_dtype: object
    whole: Mapping[str, Any] = field(default_factory=dict, repr=False)
    quantisation: Mapping[str, Any] = field(default_factory=dict)
    is_overridden: bool = False

    @property
    def where(self) -> str:
        """Return what messages call it."""
        return f"{CONFIG} with --hf-overrides" if self.is_overridden else CONFIG

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype of the stored weights; None where it is not told."""
        if self.said_dtype is None:
            return None
        if not isinstance(self.said_dtype, str) or self.said_dtype not in STORED_DTYPES:
            raise NotUnderstood(f"{CONFIG} says dtype {self.said_dtype!r}")
        return STORED_DTYPES[self.said_dtype]


def read_description(name: str) -> Description:
    """Return the description in a folder or hub id; `ModelRefused` says why there is none."""
    try:
        path = find_file(name, CONFIG)
        said = None if path is None else json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise ModelRefused(f"{name}: cannot be read as a model: {first_line_of(exc)}") from exc
    if not isinstance(said, dict):
        why = f"there is no {CONFIG}" if path is None else f"{CONFIG} holds no JSON object"
        raise ModelRefused(f"{name}: cannot be read as a model: {why}")
    return described(name, said)


def described(name: str, said: Mapping[str, Any]) -> Description:
    """Return what a config.json says that was read already."""
    text = said.get("text_config")
    fields = text if isinstance(text, dict) else said
    ties = [tie for part in (fields, said) if (tie := part.get(TIE)) is not None]
    if fields is not said and ties:
        # What is said of the whole holds for the text, too.
        fields = {**fields, TIE: True if True in ties else ties[0]}
    kind = fields.get("model_type", TEXT_OF_KIND.get(str(said.get("model_type"))))
    quantised = [how for part in (fields, said) if (how := part.get("quantization_config"))]
    stored = [part.get(key) for part in (fields, said) for key in ("dtype", "torch_dtype")]
    return Description(
        name=name,
        kind=str(kind),
        fields=fields,
        is_part=isinstance(text, dict) or "vision_config" in said,
        whole=said,
        said_dtype=next((dtype for dtype in stored if dtype), None),
        quantisation=_as_object(quantised[0]) if quantised else {},
    )


def _as_object(said: Any) -> Mapping[str, Any]:
    return said if isinstance(said, Mapping) else {"quant_method": said}


class Fields:
    """The fields of a JSON object, each taken by its name; `where` is what messages call it."""

    def __init__(
        self, where: str, said: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.where = where
        self._said = {**(defaults or {}), **said}
        self._left = {
            key
            for key, value in said.items()
            if not (_is_empty(value) or key in _SILENT or key.endswith(_SILENT_ENDS))
        }

    def take(self, key: str, default: Any = None) -> Any:
        """Return what a field says, whatever it is; an absent one says its default."""
        self._left.discard(key)
        return self._said.get(key, default)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number above 0; without a default one must be there."""
        value = self.take(key)
        value = default if value is None else value
        if value is None:
            raise NotUnderstood(f"{self.where} leaves out {key}")
        if type(value) is int and value > 0:
            return value
        if key in COUNTS:
            raise ModelRefused(f"{self.where} says {key} {value!r}; it must be a count.")
        raise NotUnderstood(f"{self.where} says {key} {value!r}")

    def num_layers(self) -> int:
        """Return how many layers there are; `ModelRefused` where no model has so many."""
        layers = self.count("num_hidden_layers")
        if layers > MAX_LAYERS:
            raise ModelRefused(
                f"{self.where} says num_hidden_layers {layers:,}; no model has above "
                f"{MAX_LAYERS:,}."
            )
        return layers

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number; without a default one must be there."""
        value = self.take(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise NotUnderstood(f"{self.where} says {key} {value!r}")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return true or false; null is the default."""
        value = self.take(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise NotUnderstood(f"{self.where} says {key} {value!r}")
        return value

    def only(self, key: str, *values: Any) -> None:
        """Accept a field that says one of these values, or nothing."""
        value = self.take(key)
        if not _is_empty(value) and value not in values:
            raise NotUnderstood(f"{self.where} says {key} {value!r}")

    def close(self) -> None:
        """Refuse to understand the whole when something was not taken."""
        if self._left:
            raise NotUnderstood(f"{self.where} says {', '.join(sorted(self._left))}")


def _is_empty(value: object) -> bool:
    """Say whether a field switches nothing on."""
    return value is None or value is False or value in ([], {}, "")
