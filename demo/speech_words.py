"""The words that the speech model knows, in both its languages, and how recordings of them go."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .voices import SAMPLE_RATE, Voice, say

Language = Literal["en", "de"]
Split = Literal["train", "held_out"]

ENGLISH = (
    "zero one two three four five six seven eight nine "
    "water wheel moon river bridge stone wind harbor night open yes boat"
).split()
GERMAN = (
    "null eins zwei drei vier fünf sechs sieben acht neun "
    "Wasser Rad Mond Fluss Brücke Stein Wind Hafen Nacht offen ja Boot"
).split()
WORDS: dict[Language, list[str]] = {"en": ENGLISH, "de": GERMAN}
"""Words by language; the same place in each list means the same, and the first ten are digits."""
NUM_DIGITS = 10
NUM_WORDS = len(ENGLISH)

WORDS_A_SEGMENT = 8
"""What is said without a pause is written down in segments of at most so many words."""

ACCENTS: dict[Language, list[str]] = {
    "en": ["en", "en-us", "en-us", "en-gb-scotland"],
    "de": ["de"],
}
SPEAKERS = ["", "+m2", "+m3", "+f1", "+f2", "+f3"]
HELD_OUT_SHARE = 10
"""One string of words in so many is never trained on."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Words said in one breath: their places in `WORDS`, and the sample where each begins.

    The last of `bounds` is where the last word ends.
    """

    words: tuple[int, ...]
    bounds: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """`samples [n]` at 16 kHz, the language spoken, and what was said when."""

    samples: NDArray[np.float32]
    language: Language
    segments: tuple[Segment, ...]

    def text(self, language: Language | None = None) -> str:
        """Return what was said, in `language` where that is another than was spoken."""
        words = WORDS[language or self.language]
        return " ".join(words[word] for segment in self.segments for word in segment.words)


def is_held_out(words: Sequence[int]) -> bool:
    """Return whether these words in this order are kept from training."""
    return zlib.crc32(bytes(words)) % HELD_OUT_SHARE == 0


def any_voice(rng: random.Random, language: Language) -> Voice:
    """Return one of the voices that the model is trained on."""
    name = rng.choice(ACCENTS[language]) + rng.choice(SPEAKERS)
    return Voice(name, rng.randint(135, 200), rng.randint(35, 65), rng.randint(40, 60))


def any_words(rng: random.Random, count: int, split: Split = "train") -> tuple[int, ...]:
    """Return `count` words, all digits for the most part; strings of 3 and more are of `split`."""
    while True:
        kind = rng.random()
        allowed = range(NUM_DIGITS) if kind < 0.5 else range(NUM_WORDS)
        if kind > 0.8:
            allowed = range(NUM_DIGITS, NUM_WORDS)
        words = tuple(rng.choice(allowed) for _ in range(count))
        if count < 3 or is_held_out(words) == (split == "held_out"):
            return words


def speak(
    phrases: Sequence[Sequence[int]],
    pauses: Sequence[float],
    language: Language,
    voice: Voice,
) -> Recording:
    """Return a recording of `phrases`: `pauses` in seconds before each of them and after the last.

    A pause inside is one that ends a segment; a phrase of many words is several segments, too.
    """
    pieces, segments, at = [], [], 0
    for phrase, pause in zip(phrases, pauses, strict=False):
        silence = np.zeros(round(pause * SAMPLE_RATE), np.float32)
        spoken = say(" ".join(WORDS[language][word] for word in phrase), voice)
        at += len(silence)
        if len(spoken.word_starts) != len(phrase):
            raise RuntimeError(f"{len(phrase)} words were said as {len(spoken.word_starts)}")
        bounds = [at + start for start in (*spoken.word_starts, len(spoken.samples))]
        for first in range(0, len(phrase), WORDS_A_SEGMENT):
            last = min(first + WORDS_A_SEGMENT, len(phrase))
            words = tuple(phrase[first:last])
            segments.append(Segment(words, tuple(bounds[first : last + 1])))
        pieces += [silence, spoken.samples]
        at += len(spoken.samples)
    pieces.append(np.zeros(round(pauses[-1] * SAMPLE_RATE), np.float32))
    return Recording(np.concatenate(pieces), language, tuple(segments))
