"""One recording from submission to result, and the window of it that is being written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from tidemill.protocol.errors import RequestError

from ..model.speech.alignment import align_tokens
from ..model.speech.architecture import SpeechArchitecture, WhisperTokens
from ..scheduling.speech import SpeechRequest, SpeechResult, SpeechSegment

# A place of a window is so many frames, and each time is one of a place.
FRAMES_A_PLACE = 2


class Piece(NamedTuple):
    """Tokens `start:stop` of a window, said from place `begins` to place `ends` of it."""

    start: int
    stop: int
    begins: int
    ends: int


class Cut(NamedTuple):
    """The pieces of a window, and how many frames of it they are about."""

    pieces: list[Piece]
    num_frames: int


def cut_window(token_ids: Sequence[int], first_timestamp: int | None, num_frames: int) -> Cut:
    """Cut what was written of a window of `num_frames`; without times it is one piece.

    `token_ids` are without prompt and end. At least one frame is gone through.
    """
    whole = Piece(0, len(token_ids), 0, num_frames // FRAMES_A_PLACE)
    if first_timestamp is None:
        return Cut([whole], num_frames)
    places = [token - first_timestamp for token in token_ids]  # negative where it is text
    stops = [i + 1 for i in range(len(places) - 1) if places[i] >= 0 and places[i + 1] >= 0]
    if not stops:
        last = next((place for place in reversed(places) if place >= 0), 0)
        return Cut([whole._replace(ends=last or whole.ends)], num_frames)
    # A single time at the end says that nothing follows it.
    is_over = len(places) > 1 and places[-2] < 0 <= places[-1]
    if is_over:
        stops.append(len(places))
    else:
        stops[-1] += 1  # the pair's second, too, is the last piece's
    starts = [0, *stops[:-1]]
    last_end = places[-1] if is_over else places[stops[-1] - 2]
    ends = [*(places[stop - 1] for stop in stops[:-1]), last_end]
    pieces = [
        Piece(start, stop, max(places[start], 0), end)
        for start, stop, end in zip(starts, stops, ends, strict=True)
    ]
    passed = last_end * FRAMES_A_PLACE
    return Cut(pieces, passed if 0 < passed < num_frames and not is_over else num_frames)


# Below and above these a window is taken for one in which nobody speaks, as Whisper does.
LEAST_LOGPROB = -1.0
MOST_SILENCE = 0.6
# What a model that knows one language knows.
ENGLISH = "en"


class Recording:
    """A request, how far it is heard, and what was said until there.

    `num_frames` are its own, without the silence that fills its last window.
    """

    def __init__(
        self, request: SpeechRequest, whisper_tokens: WhisperTokens, num_frames: int
    ) -> None:
        self.request = request
        self.num_frames = num_frames
        self.features: Tensor | None = None  # [mels, frames], while it is heard
        self.language = request.language if whisper_tokens.languages else ENGLISH
        self.seek = 0
        self.windows: list[Window] = []  # those that are written, silent ones too
        self.segments: list[SpeechSegment] = []
        self.num_prompt_tokens = self.num_output_tokens = 0
        self._num_emitted = 0  # of the segments
        self.error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Say whether nothing of it is left to hear."""
        return self.seek >= self.num_frames

    def part(self) -> SpeechResult | None:
        """Return what was said since this was asked last, with all tokens so far, if streamed."""
        if not self.request.is_streamed:
            return None
        first, self._num_emitted = self._num_emitted, len(self.segments)
        return self._result_from(first)

    def result(self) -> SpeechResult:
        """Return what was said, once it is heard; raises its error if it failed."""
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
    """One window of a recording, its text so far, and where it runs.

    Its `tokens` are a prompt of `num_prompt` and what was written; `num_computed` of them have keys
    and values. While its language `is_unknown` they are the start alone.
    """

    recording: Recording
    has_times: bool
    is_unknown: bool
    seek: int
    tokens: list[int] = field(default_factory=list)
    num_prompt: int = 0
    most_tokens: int = 0
    num_computed: int = 0
    slot: int = -1
    states: Tensor | None = None  # [S, H], where words are asked for
    sum_logprobs: float = 0.0
    no_speech_prob: float = 0.0
    is_done: bool = False

    @property
    def written(self) -> list[int]:
        """Return what was written, an end among it."""
        return self.tokens[self.num_prompt :]

    @property
    def avg_logprob(self) -> float:
        """Return the mean log-probability of what was written."""
        return self.sum_logprobs / max(1, len(self.tokens) - self.num_prompt)

    @property
    def is_silent(self) -> bool:
        """Say whether nobody seems to speak: then what was written is noise."""
        return self.avg_logprob < LEAST_LOGPROB and self.no_speech_prob > MOST_SILENCE

    def features(self, num_frames: int) -> Tensor:
        """Return its features `[mels, num_frames]`: zeros behind the recording's."""
        assert self.recording.features is not None
        own = self.recording.features[:, self.seek : self.seek + num_frames]
        return functional.pad(own, (0, num_frames - own.shape[1]))

    def start_over(self) -> None:
        """Forget what was computed and written, for another time."""
        self.tokens, self.num_prompt, self.num_computed, self.slot = [], 0, 0, -1
        self.states, self.sum_logprobs, self.is_done = None, 0.0, False


class Transcriber:
    """Whisper's prompts for one model, and the segments read from its output."""

    def __init__(
        self, whisper_tokens: WhisperTokens, model: SpeechArchitecture, frame_seconds: float
    ) -> None:
        self._steering = whisper_tokens
        self._num_targets, self._window_frames = model.max_target_positions, model.window_frames
        self._median_width = model.median_filter_width
        self._frame_seconds = frame_seconds

    def check(self, request: SpeechRequest, num_frames: int) -> None:
        """Refuse what this model can never do, in words for the request."""
        whisper_tokens = self._steering
        if not len(request.samples):
            raise RequestError("The recording is empty.", param="file")
        if request.language is not None and request.language not in (
            whisper_tokens.languages or (ENGLISH,)
        ):
            raise RequestError(
                f"The model does not know the language {request.language!r}.", param="language"
            )
        if request.task not in (whisper_tokens.tasks or ("transcribe",)):
            raise RequestError(f"The model cannot {request.task}: it knows one language.")
        if whisper_tokens.no_timestamps is None and self._has_times(request, num_frames):
            raise RequestError(
                "The model tells no times: neither those of segments or words, nor where the next "
                "part of a recording that is longer than its window begins."
            )
        if any(not 0 <= token < whisper_tokens.end for token in request.prompt_ids):
            raise RequestError("The prompt has tokens that are none of a text.", param="prompt")

    def next_window(self, recording: Recording) -> Window:
        """Return the window at which a recording stands."""
        window = Window(
            recording=recording,
            has_times=self._has_times(recording.request, recording.num_frames),
            is_unknown=recording.language is None,
            seek=recording.seek,
        )
        self.start_window(window)
        return window

    def start_window(self, window: Window) -> None:
        """Put the prompt of a window down, or what its language is asked for by."""
        whisper_tokens, recording = self._steering, window.recording
        window.is_unknown = recording.language is None
        window.num_computed = 0
        if window.is_unknown:
            window.tokens = [whisper_tokens.start]
            return
        request, before = recording.request, []
        if request.prompt_ids and whisper_tokens.prompt_start is not None:
            most = self._num_targets // 2 - 1
            before = [whisper_tokens.prompt_start, *request.prompt_ids[-most:]]
        told = [whisper_tokens.start]
        if recording.language is not None and whisper_tokens.languages:
            told.append(whisper_tokens.languages[recording.language])
            told += [whisper_tokens.tasks[request.task]] if whisper_tokens.tasks else []
        else:
            told += [
                token for token in whisper_tokens.forced if token != whisper_tokens.no_timestamps
            ]
        if not window.has_times and whisper_tokens.no_timestamps is not None:
            told.append(whisper_tokens.no_timestamps)
        window.tokens = [*before, *told]
        window.num_prompt = len(window.tokens)
        most = whisper_tokens.max_length or self._num_targets
        window.most_tokens = min(most + window.num_prompt, self._num_targets)

    def start_row(self, window: Window) -> int:
        """Return where in its prompt a window's text starts, behind what was said before."""
        return window.tokens.index(self._steering.start)

    def store_cross_attention(self, window: Window, looks: Tensor | None) -> None:
        """Take what was written of a window to its recording, which goes on behind it.

        `looks [A, T, S]` are where heads looked at each token of the window but the last.
        """
        recording, whisper_tokens = window.recording, self._steering
        recording.windows.append(window)
        recording.num_prompt_tokens += window.num_prompt
        recording.num_output_tokens += len(window.written)
        num_frames = min(recording.num_frames - window.seek, self._window_frames)
        if window.is_silent:
            recording.seek += num_frames
            return
        written = window.written
        if written and written[-1] == whisper_tokens.end:
            written = written[:-1]
        first = whisper_tokens.first_timestamp if window.has_times else None
        cut = cut_window(written, first, num_frames)
        times = None if looks is None else self._times(window, looks)
        for piece in cut.pieces:
            self._add_segment(window, written, piece, times)
        recording.seek += cut.num_frames

    def _add_segment(
        self, window: Window, written: list[int], piece: Piece, times: list[float] | None
    ) -> None:
        """Add a piece to its recording's segments, where it says something."""
        recording = window.recording
        offset = window.seek * self._frame_seconds
        place_seconds = FRAMES_A_PLACE * self._frame_seconds
        places = [i for i in range(piece.start, piece.stop) if written[i] < self._steering.end]
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
                token_ids=tuple(written[i] for i in places),
                seek=window.seek,
                temperature=recording.request.sampling.temperature,
                avg_logprob=window.avg_logprob,
                no_speech_prob=window.no_speech_prob,
                token_times=token_times,
            )
        )

    def _times(self, window: Window, looks: Tensor) -> list[float]:
        """Return when each token that was written ends, in seconds from the window's start."""
        frames = window.recording.num_frames - window.seek
        heard = looks[:, window.num_prompt :, : max(1, frames // FRAMES_A_PLACE)]
        places = align_tokens(heard, self._median_width)
        seconds = (places * (FRAMES_A_PLACE * self._frame_seconds)).tolist()
        return [*seconds, seconds[-1] if seconds else 0.0]

    def _has_times(self, request: SpeechRequest, num_frames: int) -> bool:
        is_long = num_frames > self._window_frames
        return request.wants_segments or request.wants_words or is_long
