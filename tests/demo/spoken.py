"""Recordings of the words that the small speech model knows, in both its languages."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from tidemill.demo import SPEECH_PATH
from tools.demo.voices import SAMPLE_RATE, Voice, say

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
"""Maximum number of words per segment of speech without a pause."""

ACCENTS: dict[Language, list[str]] = {
    "en": ["en", "en-us", "en-us", "en-gb-scotland"],
    "de": ["de"],
}
SPEAKERS = ["", "+m2", "+m3", "+f1", "+f2", "+f3"]
HELD_OUT_SHARE = 10
"""One in this many word sequences is held out of the training."""
BATCH_RECORDINGS = 40
SEED = 1
DEFAULT = Voice()


@dataclass(frozen=True, slots=True)
class Segment:
    """Words spoken without a pause: their places in `WORDS`, and the first sample of each.

    The last of `bounds` is where the last word ends.
    """

    words: tuple[int, ...]
    bounds: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """`samples [n]` at 16 kHz, the language, and the words with their times."""

    samples: NDArray[np.float32]
    language: Language
    segments: tuple[Segment, ...]

    def text(self, language: Language | None = None) -> str:
        """Return the spoken text, translated if `language` is another one."""
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
            raise RuntimeError(f"{len(phrase)} words were spoken as {len(spoken.word_starts)}")
        bounds = [at + start for start in (*spoken.word_starts, len(spoken.samples))]
        for first in range(0, len(phrase), WORDS_A_SEGMENT):
            last = min(first + WORDS_A_SEGMENT, len(phrase))
            words = tuple(phrase[first:last])
            segments.append(Segment(words, tuple(bounds[first : last + 1])))
        pieces += [silence, spoken.samples]
        at += len(spoken.samples)
    pieces.append(np.zeros(round(pauses[-1] * SAMPLE_RATE), np.float32))
    return Recording(np.concatenate(pieces), language, tuple(segments))


def recite(text: str, language: Language, pauses: tuple[float, ...], voice: Voice) -> Recording:
    """Return `text`, in which a comma is a pause, as it is spoken."""
    phrases = [[WORDS[language].index(word) for word in part.split()] for part in text.split(",")]
    return speak(phrases, pauses, language, voice)


@dataclass(frozen=True, slots=True)
class Clip:
    """One of the recordings in `tests/demo/recordings`: a comma in `text` is a pause."""

    name: str
    text: str
    language: Language = "en"
    voice: Voice = DEFAULT

    @property
    def kind(self) -> str:
        """The ending of its file."""
        return self.name.rpartition(".")[2]

    def recording(self) -> Recording:
        """Return it spoken; it begins and ends in a little silence."""
        num_phrases = self.text.count(",") + 1
        return recite(self.text, self.language, (0.3, *[0.8] * (num_phrases - 1), 0.4), self.voice)


def _long(seed: int, phrases: int, words: int, known: list[str]) -> str:
    """Return some of the `known` words, enough to fill more than one window."""
    rng = random.Random(seed)
    return ",".join(" ".join(rng.choices(known, k=words)) for _ in range(phrases))


CLIPS = (
    Clip("digits.wav", "three one four"),
    Clip("numbers.flac", "two seven one eight", voice=Voice("en-us+f3", 180)),
    Clip("words.mp3", "water wheel moon river", voice=Voice("en-gb-scotland+m3", 160)),
    Clip("german.ogg", "drei eins vier Wasser", "de", Voice("de+f2", 160)),
    Clip("pauses.m4a", _long(6, 5, 5, WORDS["en"]), voice=Voice("en-us+m2", 160)),
    Clip("breathless.webm", _long(111, 1, 24, WORDS["en"][:NUM_DIGITS]), voice=Voice("en-us", 140)),
)
"""The last two are longer than a window of the speech model, with pauses and without one."""


def load_speech_model(folder: Path = SPEECH_PATH) -> tuple[Any, Any]:
    """Load a saved model and its processor for transcription in fp32."""
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), WhisperProcessor.from_pretrained(folder)


@torch.inference_mode()
def listen(
    model: Any, processor: Any, recordings: Sequence[NDArray[np.float32]], **options: Any
) -> list[str]:
    """Return the transcripts of `recordings` by transformers, as one batch.

    What is longer than a window goes through the model's own timestamps.
    """
    window = processor.feature_extractor.n_samples
    is_long = any(len(samples) > window for samples in recordings)
    rest = {"truncation": False, "padding": "longest"} if is_long else {}
    inputs = processor(
        list(recordings),
        sampling_rate=SAMPLE_RATE,
        return_tensors="pt",
        return_attention_mask=True,
        **rest,
    )
    if is_long and inputs.input_features.shape[-1] <= processor.feature_extractor.nb_max_frames:
        raise ValueError("Not longer than a window")
    ids = model.generate(**inputs, return_timestamps=is_long, do_sample=False, **options)
    return [text.strip() for text in processor.batch_decode(ids, skip_special_tokens=True)]


def held_out(
    count: int, language: Language, *, digits: bool = True, phrases: int = 1, seed: int = SEED
) -> list[Recording]:
    """Return recordings of strings of words that were never trained on, in any of the voices."""
    rng = random.Random(f"{seed} {language} {digits} {phrases}")
    recordings: list[Recording] = []
    while len(recordings) < count:
        phrases_drawn = [any_words(rng, rng.randint(3, 10), "held_out") for _ in range(phrases)]
        if digits != all(word < 10 for words in phrases_drawn for word in words):
            continue
        pauses = [
            rng.uniform(0, 0.6),
            *[rng.uniform(0.4, 1.3)] * (phrases - 1),
            rng.uniform(0, 0.6),
        ]
        recordings.append(speak(phrases_drawn, pauses, language, any_voice(rng, language)))
    return recordings


def share_right(
    loaded: tuple[Any, Any],
    recordings: Sequence[Recording],
    written_in: Language | None = None,
    **options: Any,
) -> float:
    """Return the share of `recordings` that are transcribed exactly."""
    right = 0
    for first in range(0, len(recordings), BATCH_RECORDINGS):
        batch = recordings[first : first + BATCH_RECORDINGS]
        texts = listen(*loaded, [one.samples for one in batch], **options)
        for one, text in zip(batch, texts, strict=True):
            right += text == one.text(written_in)
    return right / len(recordings)
