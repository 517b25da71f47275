"""Whisper config: config.json, generation_config.json and preprocessor_config.json.

They are read as plain JSON. A missing required field, or an unsupported one, makes the model
refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from ...errors import ModelRefused
from ...scheduling.speech import FeatureSettings, Hearing, Task
from ..config.feature_settings import read_features, read_json
from ..config.hf_config import (
    CONFIG,
    MAX_LAYERS,
    QUANTISED,
    ConfigFields,
    UnsupportedConfig,
    read_hf_config,
)
from ..families.refused_types import SPEECH
from .architecture import SpeechArchitecture, WhisperTokens

KIND = "whisper"
GENERATION = "generation_config.json"
_LANGUAGE = re.compile(r"^<\|(.+)\|>$")


@dataclass(frozen=True, slots=True)
class WhisperConfig:
    """Config of a folder or hub id; `stored_dtype` is its name for the weights' dtype."""

    name: str
    architecture: SpeechArchitecture
    whisper_tokens: WhisperTokens
    features: FeatureSettings
    stored_dtype: object

    @property
    def hearing(self) -> Hearing:
        """Return the features of the model that requests may use."""
        whisper_tokens, features = self.whisper_tokens, self.features
        has_times = whisper_tokens.no_timestamps is not None
        return Hearing(
            sampling_rate=features.sampling_rate,
            window_seconds=features.window_frames * features.hop_length / features.sampling_rate,
            languages=tuple(whisper_tokens.languages),
            tasks=tuple(whisper_tokens.tasks) or ("transcribe",),
            max_prompt_tokens=self.architecture.max_target_positions // 2 - 1,
            has_timestamps=has_times,
            has_word_times=has_times,
        )


def read_speech(name: str) -> WhisperConfig:
    """Return the config of a Whisper model; `ModelRefused` explains why it is not supported."""
    hf_config = read_hf_config(name)
    kind = hf_config.raw.get("model_type", KIND)
    if kind != KIND:
        raise ModelRefused(f"{name}: model type {kind!r} is not supported: {SPEECH}.")
    if hf_config.quantization_config:
        raise ModelRefused(f"{name}: {QUANTISED}")
    try:
        architecture = _architecture(ConfigFields(f"{name}: {CONFIG}", hf_config.fields))
        whisper_tokens = _steering(name, hf_config.fields, architecture)
        features = _features(name, architecture)
    except UnsupportedConfig as exc:
        raise ModelRefused(f"{exc}.") from exc
    return WhisperConfig(name, architecture, whisper_tokens, features, hf_config.stored_dtype)


def _architecture(fields: ConfigFields) -> SpeechArchitecture:
    fields.allow("activation_function", "gelu")
    hidden = fields.count("d_model")
    heads = {side: fields.count(f"{side}_attention_heads") for side in ("encoder", "decoder")}
    for side, count in heads.items():
        if hidden % count:
            raise UnsupportedConfig(
                f"{fields.where} has {side}_attention_heads {count}, which does not divide d_model "
                f"{hidden}"
            )
    layers = {side: fields.count(f"{side}_layers") for side in ("encoder", "decoder")}
    for side, count in layers.items():
        if count > MAX_LAYERS:
            raise UnsupportedConfig(f"{fields.where} has unsupported {side}_layers {count:,}")
    return SpeechArchitecture(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        num_mels=fields.count("num_mel_bins", 80),
        max_source_positions=fields.count("max_source_positions", 1500),
        max_target_positions=fields.count("max_target_positions", 448),
        encoder_layers=layers["encoder"],
        encoder_heads=heads["encoder"],
        encoder_ffn_dim=fields.count("encoder_ffn_dim"),
        decoder_layers=layers["decoder"],
        decoder_heads=heads["decoder"],
        decoder_ffn_dim=fields.count("decoder_ffn_dim"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=True),
        median_filter_width=fields.count("median_filter_width", 7),
    )


def _steering(
    name: str, config: Mapping[str, Any], architecture: SpeechArchitecture
) -> WhisperTokens:
    """Return the tokens of the generation config; the config supplies what it leaves out."""
    generation = read_json(name, GENERATION)
    merged = {**config, **{key: value for key, value in generation.items() if value is not None}}
    where = f"{name}: {GENERATION if generation else CONFIG}"
    ids = _Ids(where, merged, architecture.vocab_size)
    suppressed = ids.many("suppress_tokens")
    prompt_start = ids.one("prev_sot_token_id")
    if prompt_start is None and len(suppressed) >= 2:
        prompt_start = suppressed[-2]  # older files show it this way
    languages = ids.named("lang_to_id")
    codes = {key: match[1] for key in languages if (match := _LANGUAGE.match(key))}
    tasks = ids.named("task_to_id")
    if merged.get("is_multilingual") is False:  # fine-tuned models may keep another model's tables
        codes, tasks = {}, {}
    end, no_timestamps = ids.needed("eos_token_id"), ids.one("no_timestamps_token_id")
    # Timestamps follow it, from a window's start to its end.
    last = architecture.vocab_size - architecture.max_source_positions - 2
    if no_timestamps is not None and not end < no_timestamps <= last:
        raise ModelRefused(
            f"{where} has no_timestamps_token_id {no_timestamps}, but the model has text tokens up "
            f"to {end} and {architecture.max_source_positions + 1} timestamps after token {last} "
            "at the latest: one of the two belongs to another model."
        )
    return WhisperTokens(
        start=ids.needed("decoder_start_token_id"),
        end=end,
        no_timestamps=no_timestamps,
        prompt_start=prompt_start,
        languages={code: languages[key] for key, code in codes.items()},
        tasks={task: tasks[task] for task in get_args(Task) if task in tasks},
        forced=ids.placed("forced_decoder_ids"),
        suppressed=suppressed,
        suppressed_at_begin=ids.many("begin_suppress_tokens"),
        max_initial_timestamp=_whole(where, merged, "max_initial_timestamp_index"),
        alignment_heads=_heads(where, merged.get("alignment_heads"), architecture),
        max_length=_whole(where, generation, "max_length"),
    )


def _heads(
    where: str, pairs: object, architecture: SpeechArchitecture
) -> tuple[tuple[int, int], ...]:
    """Return the alignment heads: if none are named, those of the upper half of layers."""
    layers, heads = architecture.decoder_layers, architecture.decoder_heads
    if not pairs:
        return tuple((layer, head) for layer in range(layers // 2, layers) for head in range(heads))
    try:
        named = tuple((int(layer), int(head)) for layer, head in pairs)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        named = ((-1, -1),)
    if not all(0 <= layer < layers and 0 <= head < heads for layer, head in named):
        raise UnsupportedConfig(f"{where} has unsupported alignment_heads {pairs!r}")
    return named


class _Ids:
    """Token ids that a file contains, each checked against the vocabulary."""

    def __init__(self, where: str, fields: Mapping[str, Any], vocab_size: int) -> None:
        self._where = where
        self._fields = fields
        self._vocab_size = vocab_size

    def one(self, key: str) -> int | None:
        """Return an id, the first of a list; None if there is none."""
        value = self._fields.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        return None if value is None else self._checked(key, value)

    def needed(self, key: str) -> int:
        """Return a required id."""
        value = self.one(key)
        if value is None:
            raise ModelRefused(f"{self._where} does not set {key}, which is required.")
        return value

    def many(self, key: str) -> tuple[int, ...]:
        """Return a list of ids; ids outside the vocabulary have no effect and are dropped."""
        values = self._fields.get(key) or ()
        return tuple(value for value in values if value in range(self._vocab_size))

    def named(self, key: str) -> dict[str, int]:
        """Return ids by their names."""
        values = self._fields.get(key) or {}
        if not isinstance(values, dict):
            raise UnsupportedConfig(f"{self._where} has unsupported {key} {values!r}")
        return {str(name): self._checked(key, value) for name, value in values.items()}

    def placed(self, key: str) -> tuple[int, ...]:
        """Return ids with their positions; empty positions are left out."""
        pairs = self._fields.get(key) or ()
        return tuple(self._checked(key, pair[-1]) for pair in pairs if pair[-1] is not None)

    def _checked(self, key: str, value: object) -> int:
        if type(value) is not int or not 0 <= value < self._vocab_size:
            raise ModelRefused(
                f"{self._where} has {key} {value!r}, which is outside its vocabulary of "
                f"{self._vocab_size:,}."
            )
        return value


def _whole(where: str, fields: Mapping[str, Any], key: str) -> int | None:
    value = fields.get(key)
    if value is not None and (type(value) is not int or value < 0):
        raise UnsupportedConfig(f"{where} has unsupported {key} {value!r}")
    return value


def _features(name: str, architecture: SpeechArchitecture) -> FeatureSettings:
    return read_features(name, architecture.num_mels, architecture.max_source_positions)
