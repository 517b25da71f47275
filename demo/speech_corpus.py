"""Training corpus of the speech model: windows of recordings, with Whisper's transcripts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor, WhisperTokenizer

from .speech_tokenizer import (
    END,
    NO_SPEECH,
    NO_TIMESTAMPS,
    START,
    START_OF_PREVIOUS,
    TIME_PRECISION,
)
from .speech_words import (
    NUM_DIGITS,
    NUM_WORDS,
    WORDS,
    Language,
    Recording,
    Segment,
    any_voice,
    any_words,
    speak,
)
from .voices import SAMPLE_RATE

WINDOW_SECONDS = 6
WINDOW_SAMPLES = WINDOW_SECONDS * SAMPLE_RATE
FRAME_SAMPLES = round(TIME_PRECISION * SAMPLE_RATE)
"""Samples that one position of the encoder stands for."""
NUM_FRAMES = WINDOW_SAMPLES // FRAME_SAMPLES
MAX_LENGTH = 128
MAX_PROMPT_TOKENS = 62
LATEST_START = 2.0
"""Seconds of silence, at most, that a first timestamp passes over."""

SILENCE_SHARE = 0.08
SINGLE_SHARE = 0.3
LONG_PHRASE_SHARE = 0.15
TIMESTAMPS_SHARE = 0.6
PROMPT_SHARE = 0.25
TRANSLATE_SHARE: dict[Language, float] = {"en": 0.15, "de": 0.5}
IGNORED = -100
NUM_LABELS = 5
MAX_COUNT = 40
"""Words of a window that are counted apart."""


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """One example: `features [80, 600]`, `ids [T]`, and which id follows each (`IGNORED`: any).

    `labels [5, 300]` tell for each position of the encoder the word there, the one before it and
    the one before that, which word of its segment it is and which of the window (0: none).
    `spans [T, 2]` are the positions of the word that the next id is a part of, empty where it is
    none.
    """

    features: NDArray[np.float32]
    ids: list[int]
    targets: list[int]
    labels: NDArray[np.int64]
    spans: list[tuple[int, int]]


def roughen(samples: NDArray[np.float32], rng: random.Random) -> NDArray[np.float32]:
    """Return `samples` at another loudness, over noise for the most part, some without treble."""
    noise_source = np.random.default_rng(rng.getrandbits(32))
    if rng.random() < 0.15:
        spectrum = np.fft.rfft(samples)
        kept = int(len(spectrum) * rng.uniform(0.5, 0.95))
        spectrum[kept:] = 0
        samples = np.fft.irfft(spectrum, len(samples)).astype(np.float32)
    samples = samples * 10 ** rng.uniform(-1.3, 0.1)
    if rng.random() < 0.5:
        noise = noise_source.standard_normal(len(samples)).astype(np.float32)
        if rng.random() < 0.5:
            noise[1:] += 0.9 * noise[:-1]
        loudness = max(float(np.sqrt(np.mean(np.square(samples)))), 1e-4)
        samples = samples + noise * loudness * 10 ** -rng.uniform(0.9, 2.2)
    return np.clip(samples, -1, 1).astype(np.float32)


class Corpus:
    """Windows without end, the same ones for the same `seed`."""

    def __init__(
        self, tokenizer: WhisperTokenizer, extractor: WhisperFeatureExtractor, seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self._extractor = extractor
        self._rng = random.Random(seed)

    def window(self) -> Window:
        """Return the next window."""
        if self._rng.random() < SILENCE_SHARE:
            return self._silence()
        while True:
            recording = self._recording()
            begin = self._window_start(recording)
            if window := self._cut(recording, begin):
                return window

    def _recording(self) -> Recording:
        rng = self._rng
        language: Language = rng.choice(["en", "en", "de"])
        if rng.random() < SINGLE_SHARE:
            counts = [rng.randint(1, 10)]
        elif rng.random() < LONG_PHRASE_SHARE:
            counts = [rng.randint(12, 24)]
        else:
            counts = [rng.randint(1, 10) for _ in range(rng.randint(2, 4))]
        phrases = [any_words(rng, count) for count in counts]
        first = rng.choice([0.0, rng.uniform(0, 0.6), rng.uniform(0, 1.8)])
        between = [rng.uniform(0.35, 1.3) for _ in counts[1:]]
        last = rng.choice([0.0, rng.uniform(0, 1), rng.uniform(0, 4)])
        return speak(phrases, [first, *between, last], language, any_voice(rng, language))

    def _window_start(self, recording: Recording) -> int:
        """Return the sample where a window begins: the start, or nearly where a segment ended."""
        if self._rng.random() < 0.5:
            return 0
        ends = [segment.bounds[-1] for segment in recording.segments[:-1]]
        return max(0, self._rng.choice([0, *ends]) + round(self._rng.gauss(0, 0.02) * SAMPLE_RATE))

    def _cut(self, recording: Recording, begin: int) -> Window | None:
        """Return the window from `begin` on; None where no segment is whole in it."""
        rng = self._rng
        end = begin + WINDOW_SAMPLES
        slack = SAMPLE_RATE // 20
        later = [s for s in recording.segments if s.bounds[-1] > begin + 4 * slack]
        whole = [s for s in later if s.bounds[-1] <= end]
        if not whole or whole[0].bounds[0] - begin > LATEST_START * SAMPLE_RATE:
            return None
        partial = later[len(whole)] if len(later) > len(whole) else None
        has_timestamps = rng.random() < TIMESTAMPS_SHARE
        samples = recording.samples[begin:end]
        if partial and (not has_timestamps or partial.bounds[0] > end - slack):
            samples = samples[: max(whole[-1].bounds[-1], partial.bounds[0] - slack) - begin]
            partial = None
        to_english = rng.random() < TRANSLATE_SHARE[recording.language]
        said: Language = "en" if to_english else recording.language
        prompt, in_figures = self._prompt(said)
        written = _Written(self._tokenizer, WORDS[said], begin, in_figures=in_figures)
        written.start(recording.language, "translate" if to_english else "transcribe", prompt)
        if not has_timestamps:
            written.special(NO_TIMESTAMPS, is_trained=False)
        for segment in whole:
            written.segment(segment, has_timestamps=has_timestamps)
        if partial:
            written.timestamp(partial.bounds[0])
        written.special(END)
        if len(written.ids) > MAX_LENGTH:
            return None
        heard = [*whole, *([partial] if partial else [])]
        labels = _labels(heard, begin, recording.language)
        return Window(self._features(samples), *written.example, labels, written.spans)

    def _silence(self) -> Window:
        rng = self._rng
        seconds = rng.choice([0.0, WINDOW_SECONDS, rng.uniform(0, WINDOW_SECONDS)])
        samples = np.zeros(max(1, round(seconds * SAMPLE_RATE)), np.float32)
        loud = rng.choice([0.0, 1e-4, 10 ** rng.uniform(-4, -1)])
        samples += loud * np.random.default_rng(rng.getrandbits(32)).standard_normal(len(samples))
        language: Language = rng.choice(["en", "de"])
        prompt, _ = self._prompt(language)
        written = _Written(self._tokenizer, WORDS[language], 0, in_figures=False)
        written.start(language, rng.choice(["translate", "transcribe"]), prompt, is_speech=False)
        if rng.random() < TIMESTAMPS_SHARE:
            written.timestamp(0)
        else:
            written.special(NO_TIMESTAMPS, is_trained=False)
        written.special(END)
        labels = _labels([], 0, language)
        features = self._features(samples.astype(np.float32))
        return Window(features, *written.example, labels, written.spans)

    def _prompt(self, language: Language) -> tuple[list[int], bool]:
        """Return tokens of what was said before, if any, and whether its digits are figures."""
        rng = self._rng
        if rng.random() >= PROMPT_SHARE:
            return [], False
        in_figures = rng.random() < 0.5
        written = _Written(self._tokenizer, WORDS[language], 0, in_figures=in_figures)
        has_timestamps = rng.random() < 0.3
        for i in range(rng.randint(1, 4)):
            words = any_words(rng, rng.randint(1, 8))
            if in_figures:
                words = (rng.randrange(NUM_DIGITS), *(w % NUM_DIGITS for w in words))
            bounds = [(2 * i + 2 * j / len(words)) * SAMPLE_RATE for j in range(len(words) + 1)]
            segment = Segment(words, tuple(round(bound) for bound in bounds))
            written.segment(segment, has_timestamps=has_timestamps)
        return written.ids[-MAX_PROMPT_TOKENS:], in_figures

    def _features(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        rough = roughen(samples, self._rng)
        found = self._extractor(rough, sampling_rate=SAMPLE_RATE, return_tensors="np")
        features: NDArray[np.float32] = found["input_features"][0]
        if self._rng.random() < 0.4:
            # Where a window is cut from features of a whole recording, what it lacks is nought.
            features[:, -(-len(samples) // self._extractor.hop_length) :] = 0
        return features


class _Written:
    """Ids as they are written down one after another, with what each of them follows on."""

    def __init__(
        self, tokenizer: WhisperTokenizer, words: list[str], begin: int, *, in_figures: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._words = [
            str(word) if in_figures and word < NUM_DIGITS else words[word]
            for word in range(NUM_WORDS)
        ]
        self._begin = begin
        self.ids: list[int] = []
        self._targets: list[int] = []
        self._spans: list[tuple[int, int]] = []

    @cached_property
    def _first_timestamp(self) -> int:
        return int(self._tokenizer.convert_tokens_to_ids(NO_TIMESTAMPS)) + 1

    @property
    def example(self) -> tuple[list[int], list[int]]:
        """The ids that are read, and what each is followed by."""
        return self.ids[:-1], self._targets[1:]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The span of the word that follows each id."""
        return self._spans[1:]

    def _add(self, token: int, target: int, span: tuple[int, int] = (0, 0)) -> None:
        self.ids.append(token)
        self._targets.append(target)
        self._spans.append(span)

    def special(self, name: str, *, is_trained: bool = True) -> None:
        """Write a special token."""
        token = int(self._tokenizer.convert_tokens_to_ids(name))
        self._add(token, token if is_trained else IGNORED)

    def start(
        self, language: Language, task: str, prompt: Sequence[int], *, is_speech: bool = True
    ) -> None:
        """Write what comes before the text; the language is told by what is heard."""
        if prompt:
            self.special(START_OF_PREVIOUS, is_trained=False)
            for token in prompt:
                self._add(token, IGNORED)
        self.special(START, is_trained=False)
        self.special(f"<|{language}|>")
        if not is_speech:
            self._targets[-1] = int(self._tokenizer.convert_tokens_to_ids(NO_SPEECH))
        self.special(f"<|{task}|>", is_trained=False)

    def timestamp(self, sample: int) -> None:
        """Write when something begins or ends."""
        steps = round(max(0, sample - self._begin) / FRAME_SAMPLES)
        token = self._first_timestamp + min(steps, NUM_FRAMES)
        self._add(token, token)

    def segment(self, segment: Segment, *, has_timestamps: bool) -> None:
        """Write the words of one segment."""
        if has_timestamps:
            self.timestamp(segment.bounds[0])
        for i, word in enumerate(segment.words):
            first, last = (
                max(0, bound - self._begin) // FRAME_SAMPLES for bound in segment.bounds[i : i + 2]
            )
            for token in self._tokenizer.encode(f" {self._words[word]}", add_special_tokens=False):
                self._add(token, token, (first, max(last, first + 1)))
        if has_timestamps:
            self.timestamp(segment.bounds[-1])


def _labels(segments: Sequence[Segment], begin: int, language: Language) -> NDArray[np.int64]:
    """Return what is heard at each of the encoder's positions, and which word it is."""
    labels = np.zeros((NUM_LABELS, NUM_FRAMES), np.int64)
    offset = 1 + list(WORDS).index(language) * NUM_WORDS
    before = [0, 0]
    for segment in segments:
        for i, word in enumerate(segment.words):
            bounds = (max(0, b - begin) // FRAME_SAMPLES for b in segment.bounds[i : i + 2])
            heard = offset + word
            number = len(before) - 1
            labels[:, slice(*bounds)] = np.array(
                [[heard], [before[-1]], [before[-2]], [i + 1], [min(number, MAX_COUNT)]]
            )
            before.append(heard)
    return labels
