"""Settings of audio features in a model's folder, which must match its encoder."""

from __future__ import annotations

import json
from typing import Any

from ...errors import ModelRefused, first_line_of
from ...scheduling.speech import FeatureSettings
from ...storage.hub import find_file
from .hf_config import CONFIG, ConfigFields, UnsupportedConfig

# Where transformers 5 and older versions keep the feature extractor's settings.
PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
FRAMES_PER_POSITION = 2


def read_features(name: str, mels: int, positions: int) -> FeatureSettings:
    """Return the settings of audio features, which must match the encoder.

    It has `positions` of `mels` bands, each of which is two frames.
    """
    raw = read_json(name, PREPROCESSOR) or read_json(name, PROCESSOR).get("feature_extractor") or {}
    fields = ConfigFields(f"{name}: {PREPROCESSOR}", raw)
    frames = FRAMES_PER_POSITION * positions
    rate, hop = fields.count("sampling_rate", 16_000), fields.count("hop_length", 160)
    if fields.count("feature_size", mels) != mels:
        raise ModelRefused(
            f"{name}: {PREPROCESSOR} has feature_size {raw['feature_size']}, but {CONFIG} has "
            f"num_mel_bins {mels}: one of the two belongs to another model."
        )
    seconds = fields.count("chunk_length", max(1, frames * hop // rate))
    if seconds * rate // hop != frames:
        raise ModelRefused(
            f"{name}: {PREPROCESSOR} has windows of {seconds} s, which are "
            f"{seconds * rate // hop} frames, but {CONFIG} has max_source_positions "
            f"{positions}, which needs {frames}: one of the two belongs to "
            "another model."
        )
    window = fields.count("n_fft", 400)
    if not hop <= window <= rate:  # samples between two windows would be lost
        raise UnsupportedConfig(
            f"{fields.where} has unsupported n_fft {window} with hop {hop} at {rate} samples per "
            "second"
        )
    return FeatureSettings(mels, rate, window, hop, frames)


def read_json(name: str, file: str) -> dict[str, Any]:
    """Return the object in a file of the model; an empty one if there is no such file."""
    try:
        path = find_file(name, file)
        content = {} if path is None else json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise ModelRefused(f"{name}: {file} cannot be read: {first_line_of(exc)}") from exc
    if not isinstance(content, dict):
        raise ModelRefused(f"{name}: {file} is not a JSON object.")
    return content
