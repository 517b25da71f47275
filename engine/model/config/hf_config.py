"""A model's config.json, read as plain JSON without loading a model library.

A field counts as understood once it is read. A field that was not read is ignored only if the
code of transformers' class never reads it either; otherwise the model is left to transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from json import JSONDecodeError
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from ...errors import ModelRefused, first_line_of
from ...storage.hub import find_file
from .transformers_fields import ROPES, class_defaults, is_class_of, may_read

_DTYPES = {
    "bf16": "bfloat16",
    "float": "float32",
    "fp16": "float16",
    "fp32": "float32",
    "half": "float16",
}
_COUNT = re.compile(
    "^(n|num)_|_(dim|embeddings|experts|heads|layers|positions|rank|size|tok|window)$"
)


def normalise(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json whose dtypes, counts and ropes have the usual types, also in its text.

    Any other value stays as it is.
    """
    fields = {key: _normalised(key, value) for key, value in raw.items()}
    return {key: value for key, value in fields.items() if value != "auto" or not _is_dtype(key)}


def _normalised(key: str, value: Any) -> Any:
    if isinstance(value, Mapping) and (
        key in ("text_config", *ROPES) or key.endswith("_attention")
    ):
        return normalise(value)
    if isinstance(value, float) and value.is_integer() and _COUNT.search(key):
        return int(value)
    if isinstance(value, str) and _is_dtype(key):
        name = value.removeprefix("torch.")
        return _DTYPES.get(name, name)
    if isinstance(value, str) and key == "rope_theta":
        return _number(value)
    if key in ("type", "rope_type") and value == "su":
        return "longrope"  # its first name
    return value


def _is_dtype(key: str) -> bool:
    return key in ("dtype", "torch_dtype")


def _number(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value


CONFIG = "config.json"
MODELOPT_CONFIG = "hf_quant_config.json"
ADAPTER = "adapter_config.json"
# Names of weights in their publisher's own format, such as Mistral's.
PARAMS = "params.json"
# The list of the networks of a diffusion model.
PIPELINE = "model_index.json"
# The deepest models have about 130.
MAX_LAYERS = 1_000
STORED_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")
}
QUANTISED = (
    "quantised weights are only supported for models that generate text; use the unquantised model."
)
# Whatever runs it, a model whose counts are not whole numbers above 0 is invalid.
COUNTS = (
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "hidden_size",
    "max_position_embeddings",
)
TIE = "tie_word_embeddings"
# The text model of a multimodal model whose config does not name it.
TEXT_OF_KIND = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm46v": "glm4v_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "glm_ocr": "glm_ocr_text",
    "internvl": "qwen2",
    "llava": "llama",
    "mistral3": "mistral",
}
# Fields that do not affect a forward pass: names, training, sampling, tokens, origin; and how
# weights are stored, which is in `HFConfig.quantisation`.
_WITHOUT_EFFECT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures
    attn_implementation auto_map
    bad_words_ids begin_suppress_tokens bos_token_id cache_implementation
    chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label initializer_factor
    initializer_range
    is_llama_config label2id language length_penalty max_length max_sequence_length min_length
    model_name model_type name name_or_path no_repeat_ngram_size num_beam_groups num_beams
    num_labels num_return_sequences
    output_attentions output_hidden_states output_router_logits output_scores pad_token_id
    prefix pretraining_tp problem_type quantization_config repetition_penalty return_dict
    return_dict_in_generate router_aux_loss_coef router_jitter_noise sep_token_id
    suppress_tokens task_specific_params temperature tokenizer_class top_k top_p torch_dtype
    torchscript transformers.js_config transformers_version transformers_weights typical_p
    unsloth_fixed unsloth_version use_cache use_return_dict
    """.split()
)


_WITHOUT_EFFECT_SUFFIXES = ("dropout", "dropout_prob", "_pdrop")


# Errors of code that computes with values of unexpected types.
MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class UnsupportedConfig(Exception):
    """Error for a config that the native networks do not support; transformers may support it."""


@dataclass(frozen=True, slots=True)
class HFConfig:
    """A config.json, and the text model in it.

    `raw` is all of it, `fields` the text model's: the `text_config` of a multimodal model, else the
    same. `stored_dtype` and `quantization_config` are as in the file. `is_overridden` is set if
    `--hf-overrides` changed it.
    """

    name: str
    model_type: str
    fields: Mapping[str, Any]
    is_multimodal: bool
    stored_dtype: object
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)
    quantization_config: Mapping[str, Any] = field(default_factory=dict)
    is_overridden: bool = False

    @property
    def where(self) -> str:
        """Return its name in messages."""
        return f"{CONFIG} with --hf-overrides" if self.is_overridden else CONFIG

    @property
    def architecture(self) -> str:
        """Return the first of the file's `architectures`, empty if there is none."""
        named = self.raw.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else ""

    def check_class(self, class_names: Iterable[str]) -> None:
        """Refuse to understand a model whose `architectures` name a class of other code.

        For a multimodal model that class is the whole model's.
        """
        named = self.raw.get("architectures") or ()
        for name in named if isinstance(named, list | tuple) else (named,):
            is_whole = self.is_multimodal and str(name).endswith("ForConditionalGeneration")
            if not (is_whole or is_class_of(name, class_names)):
                raise UnsupportedConfig(f"{self.where} has unsupported architectures {name!r}")

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype of the stored weights; None if the config does not contain it."""
        if self.stored_dtype is None:
            return None
        if not isinstance(self.stored_dtype, str) or self.stored_dtype not in STORED_DTYPES:
            raise UnsupportedConfig(f"{CONFIG} has unsupported dtype {self.stored_dtype!r}")
        return STORED_DTYPES[self.stored_dtype]


def read_hf_config(name: str) -> HFConfig:
    """Return the config of a folder or hub id; `ModelRefused` explains a missing one."""
    try:
        path = find_file(name, CONFIG)
        if path is None:
            raise ModelRefused(f"{name}: {_reason_without_config(name)}")
        raw = json.loads(path.read_bytes())
    except (JSONDecodeError, UnicodeDecodeError, RecursionError) as exc:
        why = (
            f"{CONFIG} is truncated or not valid JSON ({first_line_of(exc)}): copy or fetch it "
            "again"
        )
        raise ModelRefused(f"{name}: cannot be read as a model: {why}") from exc
    except (OSError, ValueError) as exc:
        raise ModelRefused(f"{name}: cannot be read as a model: {first_line_of(exc)}") from exc
    if not isinstance(raw, dict):
        raise ModelRefused(f"{name}: cannot be read as a model: {CONFIG} is not a JSON object")
    config = parse_hf_config(name, raw)
    if config.quantization_config:
        return config
    return replace(config, quantization_config=_modelopt_config(name, path.parent))


def _modelopt_config(name: str, folder: Path) -> Mapping[str, Any]:
    """Return the quantisation that NVIDIA's ModelOpt stores in a separate file; {} without one."""
    path = folder / MODELOPT_CONFIG
    if not path.is_file():
        return {}
    try:
        quantization: Mapping[str, Any] = json.loads(path.read_bytes())["quantization"]
        return quantization if quantization["quant_algo"] else {}
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise ModelRefused(
            f"{name}: {MODELOPT_CONFIG} has no valid quantization: copy or fetch it again"
        ) from exc


def _reason_without_config(name: str) -> str:
    """Return the kind of a folder or hub id without a config.json, and what to do."""
    if (adapter := find_file(name, ADAPTER)) is not None:
        base = _base_model(adapter)
        which = "" if base is None else f" ({base}, according to its {ADAPTER})"
        return (
            f"it is an adapter, not a model: pass its base model{which} with --model and the "
            f"adapter with --lora-modules NAME={name}"
        )
    if find_file(name, PARAMS) is not None:
        return (
            f"its weights are in their publisher's own format ({PARAMS}, consolidated.*), which is "
            f"not supported: fetch {CONFIG}, model*.safetensors and the tokenizer from the same "
            "repository, or use a version in transformers' format"
        )
    if find_file(name, PIPELINE) is not None:
        return (
            f"it is a diffusion model ({PIPELINE}), which is not supported: only models that write "
            "text, compute vectors or labels, or transcribe are"
        )
    return f"cannot be read as a model: it has no {CONFIG}"


def _base_model(adapter: Path) -> str | None:
    """Return the base model of an adapter; None where it names none."""
    try:
        base = json.loads(adapter.read_bytes())["base_model_name_or_path"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    return base if isinstance(base, str) and base and base.isprintable() else None


def parse_hf_config(name: str, raw: Mapping[str, Any]) -> HFConfig:
    """Return the config in the content of a config.json."""
    raw = normalise(raw)
    text = raw.get("text_config")
    fields = text if isinstance(text, dict) else raw
    ties = [tie for part in (fields, raw) if (tie := part.get(TIE)) is not None]
    if fields is not raw and ties:
        # A tie of the whole model's embeddings applies to its text model, too.
        fields = {**fields, TIE: True if True in ties else ties[0]}
    kind = fields.get("model_type", TEXT_OF_KIND.get(str(raw.get("model_type"))))
    parts = (fields, raw)
    quantised = [how for part in parts if (how := part.get("quantization_config"))]
    quantised += [how for part in parts if isinstance(how := part.get("quantization"), Mapping)]
    stored = [part.get(key) for part in (fields, raw) for key in ("dtype", "torch_dtype")]
    return HFConfig(
        name=name,
        model_type=str(kind),
        fields=fields,
        is_multimodal=isinstance(text, dict) or "vision_config" in raw,
        raw=raw,
        stored_dtype=next((dtype for dtype in stored if dtype), None),
        quantization_config=_as_object(quantised[0]) if quantised else {},
    )


def _as_object(raw: Any) -> Mapping[str, Any]:
    return raw if isinstance(raw, Mapping) else {"quant_method": raw}


class ConfigFields:
    """The fields of a JSON object, each read by its name; `where` is its name in messages.

    `defaults` replace missing fields; `renamed` are fields by other names. With a `model_type`,
    fields that its class in transformers never reads may be left over.
    """

    def __init__(
        self,
        where: str,
        fields: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        renamed: Mapping[str, str] | None = None,
        *,
        model_type: str | None = None,
    ) -> None:
        self.where = where
        self._ignored: set[str] = set()
        if model_type is not None:
            fields = self._without_unread(fields, model_type, renamed or {})
            defaults = {**class_defaults(model_type), **(defaults or {})}
        own = {other: fields[key] for key, other in (renamed or {}).items() if key in fields}
        others = {key: value for key, value in fields.items() if key not in (renamed or {})}
        # A field that is set under both names must have one value.
        self._twice = {key for key in own.keys() & others.keys() if own[key] != others[key]}
        fields = {**others, **own}
        self._fields = {**(defaults or {}), **fields}
        self._model_type = model_type
        self._left = {
            key
            for key, value in fields.items()
            if not (
                _is_empty(value) or key in _WITHOUT_EFFECT or key.endswith(_WITHOUT_EFFECT_SUFFIXES)
            )
        }

    def _without_unread(
        self, fields: Mapping[str, Any], model_type: str, renamed: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the fields without other families' names for them, and with reduced ropes."""
        remaining: dict[str, Any] = {}
        for key, value in fields.items():
            if key in renamed.values() and not may_read(model_type, key):
                self._ignored.add(key)
            elif key in ROPES and isinstance(value, Mapping):
                remaining[key] = self._cut_rope(key, value, model_type)
            else:
                remaining[key] = value
        return remaining

    def _cut_rope(self, path: str, rope: Mapping[str, Any], model_type: str) -> dict[str, Any]:
        """Return a rope, or one for each kind of layer, without parameters that are never read."""
        remaining: dict[str, Any] = {}
        for key, value in rope.items():
            if isinstance(value, Mapping):
                remaining[key] = self._cut_rope(f"{path}.{key}", value, model_type)
            elif _is_empty(value) or may_read(model_type, key):
                remaining[key] = value
            else:
                self._ignored.add(f"{path}.{key}")
        return remaining

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field's value of any type; a missing field has its default."""
        self._left.discard(key)
        return self._fields.get(key, default)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number above 0; without a default the field is required."""
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise UnsupportedConfig(f"{self.where} does not set {key}")
        if type(value) is int and value > 0:
            return value
        if key in COUNTS:
            raise ModelRefused(
                f"{self.where} has {key} {value!r}; it must be a whole number above 0."
            )
        raise UnsupportedConfig(f"{self.where} has unsupported {key} {value!r}")

    def num_layers(self) -> int:
        """Return the number of layers; `ModelRefused` if it is impossibly large."""
        kinds = self._fields.get("layers_block_type")
        layers = self.count("num_hidden_layers", len(kinds) if isinstance(kinds, list) else None)
        if layers > MAX_LAYERS:
            raise ModelRefused(
                f"{self.where} has num_hidden_layers {layers:,}; no model has more than "
                f"{MAX_LAYERS:,}."
            )
        return layers

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number; without a default the field is required."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise UnsupportedConfig(f"{self.where} has unsupported {key} {value!r}")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return true or false; null is the default."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise UnsupportedConfig(f"{self.where} has unsupported {key} {value!r}")
        return value

    def allow(self, key: str, *values: Any) -> None:
        """Accept a missing field or one of these values."""
        value = self.get(key)
        if not _is_empty(value) and value not in values:
            raise UnsupportedConfig(f"{self.where} has unsupported {key} {value!r}")

    def check_all_read(self) -> tuple[str, ...]:
        """Refuse to understand a config with unread fields; return those that are ignored."""
        kind = self._model_type
        read = {key for key in self._left if kind is None or may_read(kind, key)} | self._twice
        if read:
            raise UnsupportedConfig(f"{self.where} has unsupported {', '.join(sorted(read))}")
        return tuple(sorted(self._ignored | self._left))


def _is_empty(value: object) -> bool:
    """Return whether a field's value enables nothing."""
    return value is None or value is False or value in ([], {}, "")
