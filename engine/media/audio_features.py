"""Audio features: log-mel spectrograms, as in transformers' WhisperFeatureExtractor.

The features are the logarithm of the power in frequency bands, one frame per hop, limited to 80 dB
below the maximum of the whole recording. A recording shorter than a window is padded with silence.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..scheduling.speech import FeatureSettings

# The upper limit of the bands, in Hz.
HIGHEST = 8_000.0
# Slaney's scale: linear up to 1 kHz in steps of 200/3 Hz, then logarithmic with 27 mels to 6.4.
LINEAR_STEP, KNEE_HERTZ, KNEE_MELS = 200.0 / 3, 1_000.0, 15.0
MELS_A_LOG = 27.0 / math.log(6.4)
LEAST_POWER = 1e-10
# Decades of power below the loudest.
RANGE = 8.0
# Frames at once, which bounds the memory for a long recording.
FRAMES_AT_ONCE = 3_000


class FeatureExtractor:
    """Computes features; may be called from any thread."""

    def __init__(self, settings: FeatureSettings) -> None:
        self.settings = settings
        self._filters = torch.from_numpy(mel_filters(settings)).float()  # [mels, bins]
        self._window = torch.hann_window(settings.n_fft)

    def num_frames(self, num_samples: int) -> int:
        """Return the number of feature frames of a recording."""
        own = self.settings
        frames = max(own.window_frames, num_samples // own.hop_length)
        return min(frames, -(-num_samples // own.hop_length))

    def features(self, samples: NDArray[np.float32]) -> Tensor:
        """Return fp32 features `[mels, frames]` of `samples [n]`: at least one window."""
        own = self.settings
        frames = max(own.window_frames, len(samples) // own.hop_length)
        logs = torch.full((own.num_mels, frames), math.log10(LEAST_POWER))
        # Later frames contain only silence.
        num_audible = min(frames, -(-(len(samples) + own.n_fft // 2) // own.hop_length))
        for start in range(0, num_audible, FRAMES_AT_ONCE):
            stop = min(start + FRAMES_AT_ONCE, num_audible)
            logs[:, start:stop] = self._logs(samples, start, stop)
        torch.clamp_(logs, min=float(logs.max()) - RANGE)
        return logs.add_(4.0).div_(4.0)

    def _logs(self, samples: NDArray[np.float32], start: int, stop: int) -> Tensor:
        """Return the logarithms of frames `start:stop`, `[mels, stop - start]`."""
        own = self.settings
        first = start * own.hop_length - own.n_fft // 2
        last = (stop - 1) * own.hop_length - own.n_fft // 2 + own.n_fft
        total = max(len(samples), own.window_frames * own.hop_length)
        piece = torch.from_numpy(_piece(samples, first, last, total))
        framed = piece.unfold(0, own.n_fft, own.hop_length) * self._window  # [frames, n_fft]
        power = torch.fft.rfft(framed).abs().square_()  # [frames, bins]
        logs: Tensor = (self._filters @ power.T).clamp_(min=LEAST_POWER).log10_()
        return logs


def _piece(samples: NDArray[np.float32], first: int, last: int, total: int) -> NDArray[np.float32]:
    """Return samples `first:last` of a recording of `total`: zero-padded, then reflected.

    Positions before the first or after the last sample are reflected.
    """
    piece = np.zeros(last - first, np.float32)
    inner = samples[max(first, 0) : min(last, total)]
    begin = max(-first, 0)
    piece[begin : begin + len(inner)] = inner
    for number in range(begin):
        mirrored = begin - number
        piece[number] = samples[mirrored] if mirrored < len(samples) else 0
    for number in range(total - first, last - first):
        mirrored = 2 * (total - 1) - (first + number)
        piece[number] = samples[mirrored] if mirrored < len(samples) else 0
    return piece


def mel_filters(settings: FeatureSettings) -> NDArray[np.float64]:
    """Return triangular filters of equal area on Slaney's mel scale, `[mels, n_fft // 2 + 1]`."""
    bins = np.linspace(0, settings.sampling_rate // 2, settings.n_fft // 2 + 1)
    edges = _hertz(np.linspace(0, _mels(HIGHEST), settings.num_mels + 2))
    rising = (bins - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - bins) / np.diff(edges)[1:, None]
    area: NDArray[np.float64] = 2.0 / (edges[2:] - edges[:-2])
    return np.maximum(0, np.minimum(rising, falling)) * area[:, None]


def _mels(hertz: float) -> float:
    if hertz < KNEE_HERTZ:
        return hertz / LINEAR_STEP
    return KNEE_MELS + math.log(hertz / KNEE_HERTZ) * MELS_A_LOG


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    above = KNEE_HERTZ * np.exp((np.maximum(mels, KNEE_MELS) - KNEE_MELS) / MELS_A_LOG)
    return np.where(mels < KNEE_MELS, mels * LINEAR_STEP, above)
