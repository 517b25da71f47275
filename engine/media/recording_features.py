"""Recordings of a prompt: decoded to features, with a digest for caching."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.protocol.errors import RequestError
from tidemill.protocol.in_flight import MemoryBudget

from ..scheduling.prompt_audio import AudioSpec
from ..scheduling.speech import FeatureSettings
from .audio_decoding import decode
from .audio_features import FeatureExtractor

# The convolutions of the last position read this many frames after a recording.
FRAMES_AFTER = 2
# Encoders such as mp3's add this much silence, which is cut.
_PADDING_SECONDS = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRecording:
    """A recording as `rows` of tokens; recordings with equal `digest` are the same.

    `pixels` are its features and those of the silence after it.
    """

    pixels: NDArray[Any]  # [mels, frames + FRAMES_AFTER]
    digest: bytes
    rows: int

    @property
    def columns(self) -> int:
        """Return 1: tokens of a recording follow one another."""
        return 1

    @property
    def num_tokens(self) -> int:
        """Return the number of its placeholder tokens in a prompt."""
        return self.rows


def decode_recording(
    data: bytes, audio_spec: AudioSpec, *, place: str, budget: MemoryBudget
) -> PreparedRecording:
    """Return a recording, decoded for a model; raises `RequestError`, which names its `place`.

    Blocks until the memory budget has room for the samples.
    """
    rate, most = audio_spec.features.sampling_rate, audio_spec.max_seconds
    samples = decode(data, rate, max_seconds=most + _PADDING_SECONDS, budget=budget, param=place)
    samples = samples[: int(most * rate)]
    if not audio_spec.num_tokens(audio_spec.num_frames(len(samples))):
        raise RequestError(
            f"The recording of `{place}` is too short: {1_000 * len(samples) / rate:.0f} ms are"
            " less than one token.",
            param=place,
            code="bad_audio",
        )
    return recording_of(samples, audio_spec)


def recording_of(samples: NDArray[np.float32], audio_spec: AudioSpec) -> PreparedRecording:
    """Return a recording of `samples [n]`, which are at the model's rate and fit its window.

    After the window's end there is nothing, which the encoder's convolutions read as zeros.
    """
    num_frames = audio_spec.num_frames(len(samples))
    features = _extractor_of(audio_spec.features).features(samples).numpy()
    padded = np.zeros((len(features), num_frames + FRAMES_AFTER), np.float32)
    own = features[:, : padded.shape[1]]
    padded[:, : own.shape[1]] = own
    digest = blake2b(samples.tobytes(), digest_size=16, person=b"recording").digest()
    return PreparedRecording(padded, digest, audio_spec.num_tokens(num_frames))


@cache
def _extractor_of(settings: FeatureSettings) -> FeatureExtractor:
    """Return the extractor of a model; its bands are computed once."""
    return FeatureExtractor(settings)
