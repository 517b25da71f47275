"""One recording from submission to result, and the window of it that is being written down."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.nn import functional

from engine.model.speech.alignment import token_places
from engine.model.speech.architecture import SpeechArchitecture, Steering
from engine.protocol.errors import RequestError
from engine.scheduling.segments import FRAMES_A_PLACE, Piece, cut_window
from engine.scheduling.speech import SpeechRequest, SpeechResult, SpeechSegment

# Below and above these a window is taken for one in which nobody speaks, as Whisper does.
LEAST_LOGPROB = -1.0
MOST_SILENCE = 0.6
# What a model that knows one language knows.
ENGLISH = "en"


class Recording:
    """A request, how far it is heard, and what was said until there.

    `num_frames` are its own, without the silence that fills its last window.
    """

    def __init__(self, request: SpeechRequest, steering: Steering, num_frames: int) -> None:
        self.request = request
        self.num_frames = num_frames
        self.features: Tensor | None = None  # [mels, frames], while it is heard
        self.language = request.language if steering.languages else ENGLISH
        self.seek = 0
        self.windows: list[Window] = []  # those that are written, silent ones too
        self.segments: list[SpeechSegment] = []
        self.num_prompt_tokens = self.num_output_tokens = 0
        self._num_told = 0  # of the segments
        self.error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Say whether nothing of it is left to hear."""
        return self.seek >= self.num_frames

    def part(self) -> SpeechResult | None:
        """Return what was said since this was asked last, with all tokens so far, if streamed."""
        if not self.request.is_streamed:
            return None
        first, self._num_told = self._num_told, len(self.segments)
        return self._said(first)

    def result(self) -> SpeechResult:
        """Return what was said, once it is heard; raises its error if it failed."""
        if self.error is not None:
            raise self.error
        return self._said(0)

    def _said(self, first: int) -> SpeechResult:
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


class Script:
    """How one model is told what to write, and how what it wrote is read."""

    def __init__(self, steering: Steering, model: SpeechArchitecture, frame_seconds: float) -> None:
        self._steering = steering
        self._num_targets, self._window_frames = model.targets, model.window_frames
        self._median_width = model.median_width
        self._frame_seconds = frame_seconds

    def check(self, request: SpeechRequest, num_frames: int) -> None:
        """Refuse what this model can never do, in words for the request."""
        steering = self._steering
        if not len(request.samples):
            raise RequestError("The recording is empty.", param="file")
        if request.language is not None and request.language not in (
            steering.languages or (ENGLISH,)
        ):
            raise RequestError(
                f"The model does not know the language {request.language!r}.", param="language"
            )
        if request.task not in (steering.tasks or ("transcribe",)):
            raise RequestError(f"The model cannot {request.task}: it knows one language.")
        if steering.no_timestamps is None and self._has_times(request, num_frames):
            raise RequestError(
                "The model tells no times: neither those of segments or words, nor where the next "
                "part of a recording that is longer than its window begins."
            )
        if any(not 0 <= token < steering.end for token in request.prompt_ids):
            raise RequestError("The prompt has tokens that are none of a text.", param="prompt")

    def next_window(self, recording: Recording) -> Window:
        """Return the window at which a recording stands."""
        window = Window(
            recording=recording,
            has_times=self._has_times(recording.request, recording.num_frames),
            is_unknown=recording.language is None,
            seek=recording.seek,
        )
        self.begin(window)
        return window

    def begin(self, window: Window) -> None:
        """Put the prompt of a window down, or what its language is asked for by."""
        steering, recording = self._steering, window.recording
        window.is_unknown = recording.language is None
        window.num_computed = 0
        if window.is_unknown:
            window.tokens = [steering.start]
            return
        request, before = recording.request, []
        if request.prompt_ids and steering.prompt_start is not None:
            most = self._num_targets // 2 - 1
            before = [steering.prompt_start, *request.prompt_ids[-most:]]
        told = [steering.start]
        if recording.language is not None and steering.languages:
            told.append(steering.languages[recording.language])
            told += [steering.tasks[request.task]] if steering.tasks else []
        else:
            told += [token for token in steering.forced if token != steering.no_timestamps]
        if not window.has_times and steering.no_timestamps is not None:
            told.append(steering.no_timestamps)
        window.tokens = [*before, *told]
        window.num_prompt = len(window.tokens)
        most = steering.max_length or self._num_targets
        window.most_tokens = min(most + window.num_prompt, self._num_targets)

    def start_row(self, window: Window) -> int:
        """Return where in its prompt a window's text starts, behind what was said before."""
        return window.tokens.index(self._steering.start)

    def take_in(self, window: Window, looks: Tensor | None) -> None:
        """Take what was written of a window to its recording, which goes on behind it.

        `looks [A, T, S]` are where heads looked at each token of the window but the last.
        """
        recording, steering = window.recording, self._steering
        recording.windows.append(window)
        recording.num_prompt_tokens += window.num_prompt
        recording.num_output_tokens += len(window.written)
        num_frames = min(recording.num_frames - window.seek, self._window_frames)
        if window.is_silent:
            recording.seek += num_frames
            return
        written = window.written
        if written and written[-1] == steering.end:
            written = written[:-1]
        first = steering.first_timestamp if window.has_times else None
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
        places = token_places(heard, self._median_width)
        seconds = (places * (FRAMES_A_PLACE * self._frame_seconds)).tolist()
        return [*seconds, seconds[-1] if seconds else 0.0]

    def _has_times(self, request: SpeechRequest, num_frames: int) -> bool:
        is_long = num_frames > self._window_frames
        return request.wants_segments or request.wants_words or is_long
