"""Speech task: transcribes the windows of many recordings together."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from numpy.typing import NDArray

from tidemill.protocol.contract import EngineStats
from tidemill.protocol.errors import InternalError

from ..media.audio_features import FeatureExtractor
from ..model.speech.architecture import WhisperTokens
from ..model.speech.runner import SpeechRunner
from ..scheduling.admission import UrgentQueue
from ..scheduling.speech import SpeechRequest, SpeechResult
from ..scheduling.step_failures import HALF, Attempts, Reliability
from .core import StepOutput
from .device_health import Failure, attempt, probe, refuse_machine_failure
from .recording import Recording, Transcriber, Window
from .speech_steps import Flight, SpeechSteps

logger = logging.getLogger(__name__)

# A window takes about 6 ms of a core, and an H100 encodes some hundred windows a second.
_FEATURE_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))


@dataclass(slots=True, eq=False)
class _Suspects:
    """Windows of a failed step, which run without other windows."""

    windows: list[Window]
    attempts: Attempts


class SpeechCore:
    """Recordings in through `add`, transcripts out of `step`.

    Up to `num_slots` windows run at a time, and those of one recording run in order. Up to
    `steps_ahead` launched steps, 0 or 1, wait for their tokens while the next is prepared. The
    windows of a failed step run again without others, first together, then in halves; one that
    fails alone is to blame, unless a canary window fails as well.
    """

    def __init__(
        self,
        runner: SpeechRunner,
        whisper_tokens: WhisperTokens,
        extractor: FeatureExtractor,
        num_slots: int,
        *,
        steps_ahead: int = 0,
    ) -> None:
        network, settings = runner.network, extractor.settings
        self._runner = runner
        self._whisper_tokens = whisper_tokens
        self._extractor = extractor
        frame_seconds = settings.hop_length / settings.sampling_rate
        self._transcriber = Transcriber(whisper_tokens, network.architecture, frame_seconds)
        self._steps = SpeechSteps(runner, whisper_tokens, extractor, self._transcriber)
        self._steps_ahead = steps_ahead
        self._threads = ThreadPoolExecutor(_FEATURE_THREADS) if steps_ahead else None
        self._flights: deque[Flight] = deque()  # the oldest first
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._waiting: deque[Recording] = deque()
        self._urgent: UrgentQueue[Recording] = UrgentQueue()
        self._running: list[Window] = []
        self._suspects: deque[_Suspects] = deque()
        self._reliability = Reliability()
        self._num_steps = self._num_failures = 0
        self._prompt_tokens = self._output_tokens = 0

    def add(self, request: SpeechRequest) -> Recording:
        """Queue one recording; raise `RequestError` if it can never run here."""
        num_frames = self._extractor.num_frames(len(request.samples))
        self._transcriber.check(request, num_frames)
        recording = Recording(request, self._whisper_tokens, num_frames)
        self._queue(recording)
        return recording

    def step(self) -> list[StepOutput[SpeechResult]] | None:
        """Encode new windows, and decode a token of each running one; None if nothing is left.

        Raises `DeviceFailed` if that fails and no recording is to blame.
        """
        self._reliability.check()
        if not (self._waiting or self._urgent or self._running or self._suspects):
            self._flights.clear()
            return None
        if self._suspects and self._flights:  # they wait for the steps before them
            self._land()
            return self._finish()
        self._num_steps += 1
        if self._suspects:
            return self._step_apart()
        self._compute_features_ahead()
        newcomers = self._admit()
        self._running += newcomers
        self._attempt(newcomers, self._steps.encode)
        ready = [window for window in self._running if window.can_go_on]
        self._attempt(ready, self._launch)
        if self._flights and (not ready or len(self._flights) > self._steps_ahead):
            self._land()
        if not self._suspects:
            self._reliability.note_good()
        return self._finish()

    def abort(self, unwanted: AbstractSet[object]) -> None:
        """Drop recordings at any stage; they yield no more events."""
        self._waiting = deque(one for one in self._waiting if one not in unwanted)
        self._urgent.remove(unwanted)
        for group in self._suspects:
            group.windows = [one for one in group.windows if one.recording not in unwanted]
        self._suspects = deque(group for group in self._suspects if group.windows)
        for window in [one for one in self._running if one.recording in unwanted]:
            self._leave(window)

    def stats(self) -> EngineStats:
        """Return counts of running, waiting and finished work; callable from another thread."""
        running = len(self._running)
        return EngineStats(
            running=running,
            waiting=len(self._waiting)
            + len(self._urgent)
            # A copy: in the meantime the engine's thread may add and remove groups.
            + sum(len(group.windows) for group in tuple(self._suspects)),
            kv_cache_usage=running / self._num_slots,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            steps=self._num_steps,
            layers=self._runner.network.num_layers_started,
            failures=self._num_failures,
        )

    def _queue(self, recording: Recording, *, is_first: bool = False) -> None:
        priority = recording.request.priority
        if priority is not None and is_first:
            self._urgent.appendleft(priority, recording)
        elif priority is not None:
            self._urgent.append(priority, recording)
        elif is_first:
            self._waiting.appendleft(recording)
        else:
            self._waiting.append(recording)

    def _admit(self) -> list[Window]:
        """Return the next windows to encode, as many as there is room for."""
        following = self._following()
        ready = [recording for recording in following if recording.is_ready]
        if not (ready or self._running):
            ready = following[:1]  # nothing else can run: encoding waits for its features
        newcomers: list[Window] = []
        for recording in ready[: len(self._free_slots)]:
            if recording.request.priority is None:
                self._waiting.remove(recording)  # it is among the first
            else:
                self._urgent.remove({recording})
            window = self._transcriber.next_window(recording)
            window.slot = self._free_slots.pop()
            newcomers.append(window)
        return newcomers

    def _following(self) -> list[Recording]:
        """Return the next recordings, as many as are encoded at once."""
        every = chain(self._urgent, self._waiting)
        return list(islice(every, self._runner.windows_at_once))

    def _compute_features_ahead(self) -> None:
        """Start to compute the features of the next recordings; an hour takes seconds."""
        if self._threads is None:
            return
        for recording in self._following():
            if recording.features is None and recording.coming is None:
                samples = recording.request.samples
                recording.coming = self._threads.submit(self._extractor.features, samples)

    def _step_apart(self) -> list[StepOutput[SpeechResult]]:
        """Run the windows of a failed step to their ends, without other windows."""
        group = self._suspects.popleft()
        for window in group.windows:
            window.slot = self._free_slots.pop()  # its previous slot was freed when it failed
            self._transcriber.start_window(window)
        others, self._running = self._running, list(group.windows)
        self._attempt(group.windows, self._write_to_the_end, group.attempts)
        outputs = self._finish()
        self._running = others
        return outputs

    def _write_to_the_end(self, windows: list[Window]) -> None:
        at_once = self._runner.windows_at_once
        for start in range(0, len(windows), at_once):
            self._steps.encode(windows[start : start + at_once])
        while left := [window for window in windows if not window.is_done]:
            self._collect(self._steps.launch(left))

    def _attempt(
        self,
        windows: list[Window],
        call: Callable[[list[Window]], None],
        attempts: Attempts | None = None,
    ) -> None:
        """Call a function that may fail; after a failure its windows run again as suspects.

        `attempts` are the windows' earlier attempts. A recording's error holds no frame of an
        exception, and so no tensor of the step.
        """
        failure = self._failure_of(lambda: call(windows)) if windows else None
        if failure is None:
            if attempts is not None:
                self._reliability.note_good(attempts)
            return
        tried = Attempts(has_failed=True) if attempts is None else attempts.failed()
        follows = tried.next_for(len(windows))
        if failure.is_for_want_of_memory:
            follows = "halves" if len(windows) > 1 else "blame"
        if follows == "blame" and attempts is not None:
            (window,) = windows
            self._blame(window, failure)
            return
        for window in windows:
            self._leave(window)
            window.start_over()
        half = len(windows) // 2
        groups = [windows[:half], windows[half:]] if follows == "halves" and half else [windows]
        tried = HALF if follows == "halves" else tried
        self._suspects.extendleft(_Suspects(group, tried) for group in reversed(groups))

    def _failure_of(self, call: Callable[[], None]) -> Failure | None:
        """Return the failure of a call, if any; raise `DeviceFailed` if the device is broken."""
        failure = attempt(call, "recording")
        if failure is not None and not failure.is_for_want_of_memory:
            self._num_failures += 1
            probe(self._runner.network.device)
        elif failure is not None:
            self._runner.free_memory()
        return failure

    def _blame(self, window: Window, failure: Failure) -> None:
        """Fail the recording of a window, if a canary does not fail in its place."""
        refuse_machine_failure(failure)
        self._steps.run_canaries(window.slot)
        window.recording.error = InternalError(failure.words, code=failure.code)
        window.is_done = True

    def _leave(self, window: Window) -> None:
        """Release a window's slot: what is launched for it is void."""
        window.attempt += 1
        self._running.remove(window)
        self._free_slots.append(window.slot)

    def _launch(self, windows: list[Window]) -> None:
        self._flights.append(self._steps.launch(windows))

    def _land(self) -> None:
        """Collect the oldest step in flight, which may fail."""
        flight = self._flights.popleft()
        self._attempt(flight.valid, lambda _: self._collect(flight))

    def _collect(self, flight: Flight) -> None:
        """Wait for a step's tokens and append them to the windows that still need them."""
        *chosen, languages, probabilities, silence = flight.readout.wait()
        valid = set(map(id, flight.valid))
        for window, prob in zip(flight.begun, silence.tolist(), strict=True):
            if id(window) in valid and self._whisper_tokens.no_timestamps is not None:
                window.no_speech_prob = prob
        known = [one for one in flight.windows[: flight.num_known] if id(one) in valid]
        if known and chosen[2].all():  # no row shows that the device works
            self._steps.run_canaries(known[0].slot)
        self._append(flight.windows[: flight.num_known], valid, chosen)
        codes = [*self._whisper_tokens.languages]
        unknown = flight.windows[flight.num_known :]
        detected = zip(unknown, languages.tolist(), probabilities.tolist(), strict=True)
        for window, place, probability in detected:
            if id(window) in valid:
                self._transcriber.hear_language(window, codes[place], probability)

    def _append(
        self, windows: list[Window], valid: AbstractSet[int], chosen: Sequence[NDArray[Any]]
    ) -> None:
        """Append the next token of each valid window."""
        columns = (column.tolist() for column in chosen)
        for window, token, logprob, is_broken in zip(windows, *columns, strict=True):
            if id(window) not in valid:
                continue
            window.num_pending -= 1
            if is_broken:
                window.recording.error = InternalError(
                    "The model's logits for this recording are not finite."
                )
            window.tokens.append(token)
            window.sum_logprobs += logprob
            is_full = len(window.tokens) >= window.most_tokens
            if is_broken:
                window.is_done = True
            elif is_full or token == self._whisper_tokens.end:
                self._transcriber.end_window(window)

    def _finish(self) -> list[StepOutput[SpeechResult]]:
        """Commit finished windows; their recordings end, or return to the front of the queue."""
        outputs: list[StepOutput[SpeechResult]] = []
        for window in [one for one in self._running if one.is_done]:
            recording = window.recording
            if recording.error is None and not window.is_unknown:
                self._commit(window)
            self._leave(window)
            if recording.error is None and not recording.is_over:
                self._queue(recording, is_first=True)
                if window.is_unknown:  # only its language was wanted
                    continue
                if (part := recording.part()) is not None:
                    outputs.append(StepOutput(recording, [], is_finished=False, part=part))
                continue
            self._prompt_tokens += recording.num_prompt_tokens
            self._output_tokens += recording.num_output_tokens
            recording.features = None
            outputs.append(StepOutput(recording, [], is_finished=True, part=recording.part()))
        return outputs

    def _commit(self, window: Window) -> None:
        looks = None

        def read_weights() -> None:
            nonlocal looks
            if window.states is not None:
                heads = self._whisper_tokens.alignment_heads
                looks = self._runner.cross_attentions(
                    window.slot, window.tokens[:-1], window.states, heads
                )

        if self._failure_of(read_weights) and (failure := self._failure_of(read_weights)):
            self._blame(window, failure)
            return
        window.states = None
        try:
            self._transcriber.store_cross_attention(window, looks)
        except Exception as exc:
            logger.exception("a window could not be committed")
            window.recording.error = InternalError(f"The engine failed on this recording: {exc}")
