"""One recording to be written down: what may be asked of the loop, and what it came to."""

from __future__ import annotations

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

    `languages` are its codes; none where it knows one language, English, and tells no other.
    A recording is heard `window_seconds` at a time. Of a prompt the last `max_prompt_tokens` are
    read. Without `has_timestamps` a recording must fit one window.
    """

    sampling_rate: int
    window_seconds: float
    languages: tuple[str, ...]
    tasks: tuple[Task, ...]
    max_prompt_tokens: int
    has_timestamps: bool = True
    has_word_times: bool = True


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """A recording of any length: `samples [n]` in fp32, mono, at the rate that the model hears.

    `language` is a code of the model's table, None where it is to be detected. `prompt_ids` are
    tokens of what was said or written before. With `wants_words` each token of a segment gets its
    time; `wants_segments` asks for times of segments, which a recording longer than one window has
    anyway. Penalties are over what was written in the same window. Of one that `is_streamed` each
    window is told once it is written. Somebody waits for one whose `priority` is above 0: it comes
    before all others.
    """

    samples: NDArray[np.float32]
    task: Task = "transcribe"
    language: str | None = None
    prompt_ids: tuple[int, ...] = ()
    sampling: Sampling = GREEDY
    wants_segments: bool = False
    wants_words: bool = False
    is_streamed: bool = False
    priority: int = 0


@dataclass(frozen=True, slots=True)
class SpeechSegment:
    """Text spoken from `start` to `end`, in seconds from the recording's start.

    `token_ids` are of text alone. `token_times` are the start and end of each, where asked for.
    `seek` is where the window began, in frames of 10 ms.
    """

    start: float
    end: float
    token_ids: tuple[int, ...]
    seek: int
    temperature: float
    avg_logprob: float
    no_speech_prob: float
    token_times: tuple[tuple[float, float], ...] | None = None


@dataclass(frozen=True, slots=True)
class SpeechResult:
    """The segments of a recording, in order; `language` is what was asked for or detected."""

    language: str | None
    segments: tuple[SpeechSegment, ...]
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def num_values(self) -> int:
        """Return how many values a body would show of it."""
        return self.num_output_tokens
