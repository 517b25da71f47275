"""A recording from submission to result, and its window that is being transcribed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from tidemill.protocol.errors import RequestError

from ..model.speech.alignment import align_tokens
from ..model.speech.architecture import SpeechArchitecture, WhisperTokens
from ..scheduling.sequence import Sampling
from ..scheduling.speech import GREEDY, SpeechRequest, SpeechResult, SpeechSegment
from .whisper_rules import has_penalties

# Frames per place of a window; each timestamp token is a place.
FRAMES_A_PLACE = 2


class Piece(NamedTuple):
    """Tokens `start:stop` of a window, spoken from place `begins` to place `ends` of it."""

    start: int
    stop: int
    begins: int
    ends: int


class Cut(NamedTuple):
    """The pieces of a window, and the number of frames that they cover."""

    pieces: list[Piece]
    num_frames: int


def cut_window(token_ids: Sequence[int], first_timestamp: int | None, num_frames: int) -> Cut:
    """Cut the output of a window of `num_frames`; without timestamps it is one piece.

    `token_ids` exclude prompt and end. The cut covers at least one frame.
    """
    whole = Piece(0, len(token_ids), 0, num_frames // FRAMES_A_PLACE)
    if first_timestamp is None:
        return Cut([whole], num_frames)
    places = [token - first_timestamp for token in token_ids]  # negative for text tokens
    stops = [i + 1 for i in range(len(places) - 1) if places[i] >= 0 and places[i + 1] >= 0]
    if not stops:
        last = next((place for place in reversed(places) if place >= 0), 0)
        return Cut([whole._replace(ends=last or whole.ends)], num_frames)
    # A single timestamp at the end means that nothing follows it.
    is_over = len(places) > 1 and places[-2] < 0 <= places[-1]
    if is_over:
        stops.append(len(places))
    else:
        stops[-1] += 1  # the last piece also includes the pair's second timestamp
    starts = [0, *stops[:-1]]
    last_end = places[-1] if is_over else places[stops[-1] - 2]
    ends = [*(places[stop - 1] for stop in stops[:-1]), last_end]
    pieces = [
        Piece(start, stop, max(places[start], 0), end)
        for start, stop, end in zip(starts, stops, ends, strict=True)
    ]
    passed = last_end * FRAMES_A_PLACE
    return Cut(pieces, passed if 0 < passed < num_frames and not is_over else num_frames)


# The language of a monolingual model.
ENGLISH = "en"


class Recording:
    """A request, its position in the recording, and the output up to there.

    `num_frames` excludes the silence that fills the last window.
    """

    def __init__(
        self, request: SpeechRequest, whisper_tokens: WhisperTokens, num_frames: int
    ) -> None:
        self.request = request
        self.num_frames = num_frames
        self.features: Tensor | None = None  # [mels, frames], while the recording runs
        self.coming: Future[Tensor] | None = None  # its features, computed in a thread
        self.language = request.language if whisper_tokens.languages else ENGLISH
        self.seek = 0
        self._languages: dict[int, str] = {}  # of windows by their seek, while it is detected
        self.windows: list[Window] = []  # transcribed windows, including silent ones
        self.segments: list[SpeechSegment] = []
        self.num_prompt_tokens = self.num_output_tokens = 0
        self._num_emitted = 0  # of the segments
        self.error: Exception | None = None

    @property
    def is_ready(self) -> bool:
        """Return whether a window can be encoded without waiting for a thread."""
        return self.coming is None or self.coming.done()

    @property
    def is_over(self) -> bool:
        """Return whether the whole recording is transcribed."""
        return self.seek >= self.num_frames

    def next_seek(self, window_frames: int) -> int:
        """Return the first frame of the next window to transcribe, or to detect the language in."""
        return self.seek if self.language is not None else len(self._languages) * window_frames

    def hear_language(self, seek: int, code: str, probability: float, window_frames: int) -> None:
        """Add the likeliest language of a window, which may set the recording's.

        The rule is faster-whisper's.
        """
        self._languages[seek] = code
        detection = self.request.detection
        num_windows = min(detection.max_windows, -(-self.num_frames // window_frames))
        if probability > detection.threshold:
            self.language = code
        elif len(self._languages) >= num_windows:
            counts = Counter(self._languages.values())
            self.language = counts.most_common(1)[0][0]  # the first of equals

    def part(self) -> SpeechResult | None:
        """Return the new segments since the last call, with all tokens so far, if streamed."""
        if not self.request.is_streamed:
            return None
        first, self._num_emitted = self._num_emitted, len(self.segments)
        return self._result_from(first)

    def result(self) -> SpeechResult:
        """Return the transcript of a finished recording; raise its error if it failed."""
        if self.error is not None:
            raise self.error
        return self._result_from(0)

    def _result_from(self, first: int) -> SpeechResult:
        return SpeechResult(
            language=self.language,
            segments=tuple(self.segments[first:]),
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
        )


@dataclass(slots=True, eq=False)
class Window:
    """One window of a recording, its output so far, and its slot.

    Its `tokens` are a prompt of `num_prompt` and the output; `num_pending` more are chosen, but
    have not arrived from the device. `num_computed` of all have keys and values. While its language
    `is_unknown` they are only the start token, and the window may be left once it is known.
    Results of an earlier `attempt` are void. `num_retries` texts at lower temperatures, with
    `num_discarded` tokens, were discarded.
    """

    recording: Recording
    has_times: bool
    is_unknown: bool
    seek: int
    tokens: list[int] = field(default_factory=list)
    num_prompt: int = 0
    most_tokens: int = 0
    num_computed: int = 0
    num_pending: int = 0
    attempt: int = 0
    slot: int = -1
    states: Tensor | None = None  # [S, H], if word timestamps are requested
    sum_logprobs: float = 0.0
    no_speech_prob: float = 0.0
    compression_ratio: float | None = None
    sampling: Sampling = GREEDY
    num_retries: int = 0
    num_discarded: int = 0
    is_done: bool = False

    @property
    def written(self) -> list[int]:
        """Return the output that has arrived, including an end token."""
        return self.tokens[self.num_prompt :]

    @property
    def num_written(self) -> int:
        """Return the number of the output's tokens, including pending ones."""
        return len(self.tokens) - self.num_prompt + self.num_pending

    @property
    def can_go_on(self) -> bool:
        """Return whether its next token can be computed, if need be after pending ones."""
        if self.is_done or not self.num_pending:
            return not self.is_done
        is_full = len(self.tokens) + self.num_pending >= self.most_tokens
        return not (self.is_unknown or is_full or has_penalties(self.recording.request.sampling))

    @property
    def avg_logprob(self) -> float:
        """Return the mean log-probability of the output."""
        return self.sum_logprobs / max(1, len(self.tokens) - self.num_prompt)

    @property
    def is_silent(self) -> bool:
        """Return whether the window seems silent: its output is then noise."""
        limits = self.recording.request.thresholds
        return self.avg_logprob < limits.logprob and self.no_speech_prob > limits.no_speech

    @property
    def needs_retry(self) -> bool:
        """Return whether its text failed, and another temperature is left (Whisper's rule)."""
        request = self.recording.request
        if self.num_retries >= len(request.retry_temperatures) or self.is_silent:
            return False
        ratio, limits = self.compression_ratio, request.thresholds
        repeats = ratio is not None and ratio > limits.compression_ratio
        return repeats or self.avg_logprob < limits.logprob

    def features(self, num_frames: int) -> Tensor:
        """Return its features `[mels, num_frames]`: zeros after the recording's end."""
        assert self.recording.features is not None
        own = self.recording.features[:, self.seek : self.seek + num_frames]
        return functional.pad(own, (0, num_frames - own.shape[1]))

    def start_over(self) -> None:
        """Reset the window for another attempt."""
        self.tokens, self.num_prompt, self.num_computed, self.slot = [], 0, 0, -1
        self.num_pending = 0
        self.states, self.sum_logprobs, self.is_done = None, 0.0, False
        self.num_retries = self.num_discarded = 0


class Transcriber:
    """Whisper's prompts for one model, and the segments of its output."""

    def __init__(
        self, whisper_tokens: WhisperTokens, model: SpeechArchitecture, frame_seconds: float
    ) -> None:
        self._whisper_tokens = whisper_tokens
        self._num_targets, self._window_frames = model.max_target_positions, model.window_frames
        self._median_width = model.median_filter_width
        self._frame_seconds = frame_seconds

    def check(self, request: SpeechRequest, num_frames: int) -> None:
        """Reject a request that this model does not support."""
        whisper_tokens = self._whisper_tokens
        if not len(request.samples):
            raise RequestError("The recording is empty.", param="file")
        if request.language is not None and request.language not in (
            whisper_tokens.languages or (ENGLISH,)
        ):
            raise RequestError(
                f"This model does not support language {request.language!r}.", param="language"
            )
        if request.task not in (whisper_tokens.tasks or ("transcribe",)):
            raise RequestError(f"This model does not support {request.task}: it is monolingual.")
        if whisper_tokens.no_timestamps is None and self._has_times(request, num_frames):
            raise RequestError(
                "This model does not support timestamps, which are also required for a recording "
                "longer than its window."
            )
        if any(not 0 <= token < whisper_tokens.end for token in request.prompt_ids):
            raise RequestError("The prompt must not contain special tokens.", param="prompt")

    def next_window(self, recording: Recording) -> Window:
        """Return the window at a recording's current position."""
        window = Window(
            recording=recording,
            has_times=self._has_times(recording.request, recording.num_frames),
            is_unknown=recording.language is None,
            seek=recording.next_seek(self._window_frames),
        )
        self.start_window(window)
        return window

    def start_window(self, window: Window) -> None:
        """Set a window's prompt, or the start token that detects its language."""
        whisper_tokens, recording = self._whisper_tokens, window.recording
        # A later window, which only detects it, may start again after a failed step.
        window.is_done = recording.language is not None and window.seek > recording.seek
        window.is_unknown = recording.language is None or window.is_done
        window.num_computed = window.num_pending = 0
        window.sampling = recording.request.sampling
        if window.num_retries:
            temperature = recording.request.retry_temperatures[window.num_retries - 1]
            window.sampling = replace(window.sampling, temperature=temperature)
        if window.is_unknown:
            window.tokens = [whisper_tokens.start]
            return
        request, before = recording.request, []
        if request.prompt_ids and whisper_tokens.prompt_start is not None:
            most = self._num_targets // 2 - 1
            before = [whisper_tokens.prompt_start, *request.prompt_ids[-most:]]
        controls = [whisper_tokens.start]
        if recording.language is not None and whisper_tokens.languages:
            controls.append(whisper_tokens.languages[recording.language])
            controls += [whisper_tokens.tasks[request.task]] if whisper_tokens.tasks else []
        else:
            controls += [
                token for token in whisper_tokens.forced if token != whisper_tokens.no_timestamps
            ]
        if not window.has_times and whisper_tokens.no_timestamps is not None:
            controls.append(whisper_tokens.no_timestamps)
        window.tokens = [*before, *controls]
        window.num_prompt = len(window.tokens)
        most = whisper_tokens.max_length or self._num_targets
        window.most_tokens = min(most + window.num_prompt, self._num_targets)

    def end_window(self, window: Window) -> None:
        """Set a window whose text has ended to done, or start its text again, warmer."""
        window.is_done = True
        ratio_of = window.recording.request.compression_ratio
        if ratio_of is not None:
            text = [token for token in window.written if token < self._whisper_tokens.end]
            window.compression_ratio = ratio_of(text)
        if not window.needs_retry:
            return
        window.num_discarded += len(window.written)
        window.num_retries += 1
        window.attempt += 1  # a step that is launched for the discarded text is void
        window.sum_logprobs, window.is_done = 0.0, False
        self.start_window(window)

    def hear_language(self, window: Window, code: str, probability: float) -> None:
        """Add the language of a window, which starts its text or is done."""
        recording = window.recording
        recording.hear_language(window.seek, code, probability, self._window_frames)
        self.start_window(window)
        window.is_done = window.is_unknown

    def start_row(self, window: Window) -> int:
        """Return the position in its prompt where a window's own text starts."""
        return window.tokens.index(self._whisper_tokens.start)

    def store_cross_attention(self, window: Window, looks: Tensor | None) -> None:
        """Add a window's output to its recording, and advance the recording past it.

        `looks [A, T, S]` is the cross-attention of each head for each token except the last.
        """
        recording, whisper_tokens = window.recording, self._whisper_tokens
        recording.windows.append(window)
        recording.num_prompt_tokens += window.num_prompt
        recording.num_output_tokens += window.num_discarded + len(window.written)
        num_frames = min(recording.num_frames - window.seek, self._window_frames)
        if window.is_silent:
            recording.seek += num_frames
            return
        output = window.written
        if output and output[-1] == whisper_tokens.end:
            output = output[:-1]
        first = whisper_tokens.first_timestamp if window.has_times else None
        cut = cut_window(output, first, num_frames)
        times = None if looks is None else self._times(window, looks)
        for piece in cut.pieces:
            self._add_segment(window, output, piece, times)
        recording.seek += cut.num_frames

    def _add_segment(
        self, window: Window, output: list[int], piece: Piece, times: list[float] | None
    ) -> None:
        """Add a piece to its recording's segments, if it contains text."""
        recording = window.recording
        offset = window.seek * self._frame_seconds
        place_seconds = FRAMES_A_PLACE * self._frame_seconds
        places = [i for i in range(piece.start, piece.stop) if output[i] < self._whisper_tokens.end]
        if not places:
            return
        token_times = None
        if times is not None:
            token_times = tuple(
                (offset + (times[i - 1] if i else 0.0), offset + times[i]) for i in places
            )
        recording.segments.append(
            SpeechSegment(
                start=offset + piece.begins * place_seconds,
                end=offset + piece.ends * place_seconds,
                token_ids=tuple(output[i] for i in places),
                seek=window.seek,
                temperature=window.sampling.temperature,
                avg_logprob=window.avg_logprob,
                no_speech_prob=window.no_speech_prob,
                compression_ratio=window.compression_ratio,
                token_times=token_times,
            )
        )

    def _times(self, window: Window, looks: Tensor) -> list[float]:
        """Return the end of each output token, in seconds from the window's start."""
        frames = window.recording.num_frames - window.seek
        attention = looks[:, window.num_prompt :, : max(1, frames // FRAMES_A_PLACE)]
        places = align_tokens(attention, self._median_width)
        seconds = (places * (FRAMES_A_PLACE * self._frame_seconds)).tolist()
        return [*seconds, seconds[-1] if seconds else 0.0]

    def _has_times(self, request: SpeechRequest, num_frames: int) -> bool:
        is_long = num_frames > self._window_frames
        return request.wants_segments or request.wants_words or is_long
