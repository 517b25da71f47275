"""Speech from espeak-ng, with the start of each word.

The library comes with the package espeakng-loader and runs in this process; it has one voice at a
time and is not thread-safe.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import espeakng_loader
import numpy as np
import soxr
from numpy.typing import NDArray

SAMPLE_RATE = 16_000
"""Sample rate of the returned speech in Hz; espeak-ng's rate differs."""

# espeak-ng's speak_lib.h.
SYNCHRONOUS, UTF8, CHARACTER = 2, 1, 1
RATE, PITCH, RANGE = 1, 3, 4
LIST_END, WORD = 0, 1

SILENT = 0.01
"""Threshold below which samples at either end count as silence."""


@dataclass(frozen=True, slots=True)
class Voice:
    """A voice: espeak-ng's `name`, words per minute, and pitches from 0 to 100."""

    name: str = "en-us"
    words_per_minute: int = 170
    pitch: int = 50
    pitch_range: int = 50


@dataclass(frozen=True, slots=True, eq=False)
class Spoken:
    """A spoken text: `samples [n]` without silence at either end, and the start of each word."""

    samples: NDArray[np.float32]
    word_starts: tuple[int, ...]


class _Event(ctypes.Structure):
    """An event that accompanies samples."""

    _fields_: ClassVar = [
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    ]


_SynthCallback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


class _Espeak:
    """The library, whose callback collects its speech in `_blocks` and `_words`."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        data = espeakng_loader.get_data_path().encode()
        self._rate = self._library.espeak_Initialize(SYNCHRONOUS, 0, data, 0)
        if self._rate <= 0:
            raise RuntimeError("espeak-ng does not start: its data was not found")
        self._callback: Callable[..., Any] = _SynthCallback(self._collect)
        self._library.espeak_SetSynthCallback(self._callback)
        self._blocks: list[NDArray[np.int16]] = []
        self._words: list[int] = []

    def _collect(self, samples: Any, num_samples: int, events: Any) -> int:
        if samples and num_samples:
            self._blocks.append(np.ctypeslib.as_array(samples, (num_samples,)).copy())
        i = 0
        while events[i].type != LIST_END:
            if events[i].type == WORD:
                self._words.append(events[i].sample)
            i += 1
        return 0

    def say(self, text: str, voice: Voice) -> tuple[NDArray[np.float32], list[int]]:
        """Return samples at `SAMPLE_RATE` and the position of each word of `text` in them."""
        if self._library.espeak_SetVoiceByName(voice.name.encode()):
            raise ValueError(f"espeak-ng has no voice {voice.name!r}")
        parameters = {RATE: voice.words_per_minute, PITCH: voice.pitch, RANGE: voice.pitch_range}
        for parameter, value in parameters.items():
            self._library.espeak_SetParameter(parameter, value, 0)
        self._blocks, self._words = [], []
        data = text.encode() + b"\0"
        self._library.espeak_Synth(data, len(data), 0, CHARACTER, 0, UTF8, None, None)
        samples = np.concatenate(self._blocks).astype(np.float32) / 32768
        words = [start * SAMPLE_RATE // self._rate for start in self._words]
        return soxr.resample(samples, self._rate, SAMPLE_RATE), words


@cache
def _espeak() -> _Espeak:
    return _Espeak()


def say(text: str, voice: Voice | None = None) -> Spoken:
    """Return `text` spoken by `voice`; breath and flutter differ each time."""
    samples, words = _espeak().say(text, voice or Voice())
    loud = np.flatnonzero(np.abs(samples) > SILENT)
    begin, end = (int(loud[0]), int(loud[-1]) + 1) if len(loud) else (0, 0)
    return Spoken(samples[begin:end], tuple(max(0, word - begin) for word in words))
