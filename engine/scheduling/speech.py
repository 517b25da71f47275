"""One recording to transcribe: its request and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .sequence import Sampling

Task = Literal["transcribe", "translate"]
GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class FeatureSettings:
    """Feature extraction: frames of `n_fft` samples every `hop_length`, in windows."""

    num_mels: int
    sampling_rate: int
    n_fft: int
    hop_length: int
    window_frames: int


@dataclass(frozen=True, slots=True)
class Hearing:
    """Abilities of a speech model: its input, languages and tasks.

    `languages` are the codes of its languages; it is empty for an English-only model. Audio is
    processed in windows of `window_seconds`. The last `max_prompt_tokens` of a prompt are used.
    Without `has_timestamps` a recording must fit into one window.
    """

    sampling_rate: int
    window_seconds: float
    languages: tuple[str, ...]
    tasks: tuple[Task, ...]
    max_prompt_tokens: int
    has_timestamps: bool = True
    has_word_times: bool = True


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits of a window's text, with Whisper's defaults.

    A window whose mean log-probability is below `logprob` is silent if its probability of silence
    is above `no_speech`. Any other such window, and one whose text compresses by more than
    `compression_ratio`, is transcribed again at the next temperature, if there is one.
    """

    compression_ratio: float = 2.4
    logprob: float = -1.0
    no_speech: float = 0.6


@dataclass(frozen=True, slots=True)
class LanguageDetection:
    """Detection by up to `max_windows` windows.

    The first window that is surer than `threshold` decides, otherwise the language of most windows.
    """

    max_windows: int = 1
    threshold: float = 0.5


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """A recording of any length: `samples [n]` in fp32, mono, at the model's sampling rate.

    `language` is one of the model's codes, or None to detect it. `prompt_ids` are tokens of the
    preceding text. With `wants_words` each token of a segment gets timestamps; `wants_segments`
    requests timestamps of segments, which a recording longer than one window has anyway. Penalties
    apply to the output of the same window. `retry_temperatures` follow that of `sampling`, one for
    each retry of a window. `compression_ratio` is a function of a window's text tokens. If it
    `is_streamed`, each window is emitted once it is transcribed. With a `priority` it is
    interactive and comes before rows of files, which have none; a lower number comes first.
    """

    samples: NDArray[np.float32]
    task: Task = "transcribe"
    language: str | None = None
    prompt_ids: tuple[int, ...] = ()
    sampling: Sampling = GREEDY
    retry_temperatures: tuple[float, ...] = ()
    thresholds: Thresholds = Thresholds()
    detection: LanguageDetection = LanguageDetection()
    compression_ratio: Callable[[Sequence[int]], float] | None = None
    wants_segments: bool = False
    wants_words: bool = False
    is_streamed: bool = False
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class SpeechSegment:
    """Text spoken from `start` to `end`, in seconds from the recording's start.

    `token_ids` contain only text. `token_times` are the start and end of each token, if requested.
    `seek` is the start of the window, in frames of 10 ms. Temperature, log-probability,
    probability of silence and compression ratio, if computed, are those of the window.
    """

    start: float
    end: float
    token_ids: tuple[int, ...]
    seek: int
    temperature: float
    avg_logprob: float
    no_speech_prob: float
    compression_ratio: float | None = None
    token_times: tuple[tuple[float, float], ...] | None = None


@dataclass(frozen=True, slots=True)
class SpeechResult:
    """The segments of a recording, in order; `language` is the requested or detected one."""

    language: str | None
    segments: tuple[SpeechSegment, ...]
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def num_values(self) -> int:
        """Return the number of values in its body."""
        return self.num_output_tokens
