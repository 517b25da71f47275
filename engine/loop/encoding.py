"""Encoding task: sequences to vectors or scores, packed into steps; without threads."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidemill.protocol.contract import EngineStats
from tidemill.protocol.errors import InternalError, RequestError

from ..model.encoders.forward import TokenSequence, pack_ids, token_counts
from ..model.encoders.loaded_encoder import LoadedEncoder
from ..scheduling.admission import UrgentQueue
from ..scheduling.encoding import EncodingRequest, EncodingResult
from ..scheduling.step_budget import StepTokenLimit
from ..scheduling.step_failures import HALF, NO_ATTEMPTS, Attempts, Reliability
from ..scheduling.token_logprobs import NO_LOGPROBS
from .core import StepOutput
from .cuda_graphs import Capture
from .device_health import Failure, attempt, probe, refuse_machine_failure, run_canaries
from .encoder_runner import EncoderRunner, LaunchedEncoding


def pack_steps(
    lengths: NDArray[np.int64], max_tokens: int, max_sequences: int
) -> list[NDArray[np.int64]]:
    """Return the sequences of each step as indexes, the longest first, without padding.

    A step has at most `max_tokens`, or a single longer sequence.
    """
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths[order])
    steps = []
    start, done = 0, 0
    while start < len(order):
        fitting = int(np.searchsorted(ends, done + max_tokens, side="right"))
        stop = min(max(fitting, start + 1), start + max_sequences)
        steps.append(order[start:stop])
        start, done = stop, int(ends[stop - 1])
    return steps


logger = logging.getLogger(__name__)

# Waiting requests are sorted in windows of this number of steps: a larger window makes steps more
# even, and makes the oldest requests wait longer.
WINDOW_STEPS = 16


@dataclass(slots=True, eq=False)
class RunningEncoding(TokenSequence):
    """One request and its result, and the later requests of the same result: it runs for all."""

    values: NDArray[np.float32] | None = None
    error: RequestError | None = None
    repeats: list[RunningEncoding] | None = None
    is_aborted: bool = False

    def result(self) -> EncodingResult:
        """Return the result, once finished; raise the request's `RequestError` if it failed."""
        if self.error is not None:
            raise self.error
        assert self.values is not None
        return EncodingResult(self.values, self.num_tokens)

    @property
    def items(self) -> list[RunningEncoding]:
        """Return the requests that wait for its result."""
        return [*(() if self.is_aborted else (self,)), *(self.repeats or ())]

    def abort(self, unwanted: AbstractSet[object]) -> None:
        """Drop the requests that are in `unwanted`; it still runs for the others."""
        self.is_aborted = self.is_aborted or self in unwanted
        self.repeats = [item for item in self.repeats or () if item not in unwanted]


@dataclass(slots=True, eq=False)
class _Step:
    """Sequences that run together, and their failed attempts."""

    sequences: list[RunningEncoding]
    attempts: Attempts = NO_ATTEMPTS

    @property
    def is_repeated(self) -> bool:
        """Return whether it has failed, as a whole or with others: it runs alone."""
        return self.attempts != NO_ATTEMPTS

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    def halves(self) -> list[_Step]:
        """Return the sequences as two steps, in the order in which they run."""
        half = len(self.sequences) // 2
        return [_Step(own, HALF) for own in (self.sequences[:half], self.sequences[half:])]

    def drop_aborted(self) -> None:
        """Remove the sequences whose requests have all left."""
        self.sequences = [sequence for sequence in self.sequences if sequence.items]


class _Flight(NamedTuple):
    """A launched step."""

    step: _Step
    launched: LaunchedEncoding


_Waiting: TypeAlias = "deque[RunningEncoding] | UrgentQueue[RunningEncoding]"


class EncodingCore:
    """Sequences in through `add`, the model's values out of `step`.

    Waiting sequences are taken in windows; a window is sorted by length and runs step by step.
    `steps_ahead` steps, 0 or 1, are in flight while the one before them is collected: with 1 the
    host prepares a step while the device computes another.
    """

    def __init__(
        self,
        model: LoadedEncoder,
        max_tokens: int,
        max_sequences: int,
        steps_ahead: int = 0,
        captures: Capture | None = None,
    ) -> None:
        self._model = model
        self._max_sequences = max_sequences
        self._runner = EncoderRunner(model, max_tokens, max_sequences, captures)
        self._steps_ahead = steps_ahead
        self._flights: deque[_Flight] = deque()  # the oldest first
        self._failed: tuple[_Step, Failure] | None = None  # after the steps in flight
        self._step_limit = StepTokenLimit(max_tokens)
        self._waiting: deque[RunningEncoding] = deque()
        self._urgent: UrgentQueue[RunningEncoding] = UrgentQueue()
        self._steps: deque[_Step] = deque()  # the remaining steps of the window
        self._reliability = Reliability()
        self._num_running = 0
        self._num_failures = 0
        self._launch_seconds = 0.0
        self._num_steps = self._prompt_tokens = self._cached_tokens = 0

    def add(self, request: EncodingRequest) -> RunningEncoding:
        """Queue one sequence; raise `RequestError` if it can never run here."""
        length, most = len(request.token_ids), self._model.max_model_len
        if request.image is None and not 0 < length <= most:
            raise RequestError(
                f"The input has {length} tokens; the number must be between 1 and {most}.",
                code="context_length_exceeded",
            )
        if not 0 <= request.num_skipped < length:
            raise RequestError(
                f"The excluded prompt has {request.num_skipped} of the input's {length} tokens: "
                "no token is left for the vector."
            )
        item = RunningEncoding(request, pack_ids(request.token_ids))
        if request.priority is None:
            self._waiting.append(item)
        else:
            self._urgent.append(request.priority, item)
        return item

    def step(self) -> list[StepOutput[EncodingResult]] | None:
        """Launch a step, collect one, or both; None if there is nothing to do.

        Raises `DeviceFailed` if steps fail and no request is to blame.
        """
        self._reliability.check()
        if self._failed is not None:
            if self._flights:  # they may be of other requests, and have arrived
                return self._collect()
            failed, self._failed = self._failed, None
            return self._follow_up(*failed)
        step = self._next_step()
        if step is None or (step.is_repeated and self._flights):
            return self._collect() if self._flights else None
        self._steps.popleft()
        self._num_steps += 1
        began = time.perf_counter()
        launched = attempt(lambda: self._runner.launch(step.sequences))
        self._launch_seconds += time.perf_counter() - began
        if isinstance(launched, Failure):
            if not self._flights:
                return self._follow_up(step, launched)
            self._failed = step, launched
            return self._collect()
        self._flights.append(_Flight(step, launched))
        is_due = step.is_repeated or len(self._flights) > self._steps_ahead
        return self._collect() if is_due else []

    def abort(self, unwanted: AbstractSet[object]) -> None:
        """Drop items at any stage; they yield no more events."""
        self._waiting = deque(item for item in self._waiting if item not in unwanted)
        self._urgent.remove(unwanted)
        failed = () if self._failed is None else (self._failed[0],)
        for step in (*self._steps, *failed, *(flight.step for flight in self._flights)):
            for sequence in step.sequences:
                sequence.abort(unwanted)
        self._drop_empty()
        steps = (*self._steps, *failed, *(flight.step for flight in self._flights))
        self._num_running = sum(len(one.items) for step in steps for one in step.sequences)

    def stats(self) -> EngineStats:
        """Return counts of running, waiting and finished work; callable from another thread."""
        return EngineStats(
            running=self._num_running,
            waiting=len(self._waiting) + len(self._urgent),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            steps=self._num_steps,
            layers=self._runner.num_layers,
            failures=self._num_failures,
            launch_seconds=self._launch_seconds,
        )

    def _next_step(self) -> _Step | None:
        """Return the step to launch next, None if there is none."""
        if self._urgent and not (self._steps and self._steps[0].attempts.has_failed):
            self._admit(self._urgent)
        elif not self._steps:
            self._admit(self._waiting)
        return self._steps[0] if self._steps else None

    def _collect(self) -> list[StepOutput[EncodingResult]]:
        """Wait for the oldest step in flight; if it fails, newer ones run again after it."""
        step, launched = self._flights.popleft()
        values = attempt(launched.wait)
        if isinstance(values, Failure):
            self._steps.extendleft(flight.step for flight in reversed(self._flights))
            self._flights.clear()
            self._drop_empty()
            return self._follow_up(step, values)
        self._step_limit.note_fit()
        self._reliability.note_good(step.attempts)
        return self._finish(step.sequences, values)

    def _follow_up(self, step: _Step, failure: Failure) -> list[StepOutput[EncodingResult]]:
        step.drop_aborted()
        if not step.sequences:
            return []
        if failure.is_for_want_of_memory:
            return self._make_room(step, failure)
        self._num_failures += 1
        probe(self._model.device)
        return self._try_again(step, failure)

    def _drop_empty(self) -> None:
        """Remove sequences whose requests have all left from the remaining steps."""
        for step in self._steps:
            step.drop_aborted()
        self._steps = deque(step for step in self._steps if step.sequences)

    def _admit(self, waiting: _Waiting) -> None:
        """Run the first waiting items next."""
        num_waiting = len(waiting)
        packed = list(self._packed(self._next_window(waiting)))
        self._steps.extendleft(reversed(packed))
        self._num_running += num_waiting - len(waiting)

    def _next_window(self, waiting: _Waiting) -> list[RunningEncoding]:
        """Take enough of the first waiting items for a window of steps; return those that run."""
        left = WINDOW_STEPS * self._step_limit.tokens
        has_types = self._model.num_types > 1
        sequences: dict[Hashable, RunningEncoding] = {}
        while waiting and left > 0:
            item = waiting.popleft()
            request = item.request
            skipped, schema, output = request.num_skipped, request.schema, request.output
            unseen = request.num_unseen
            type_ids = request.type_ids if has_types and request.has_types else None
            # Bytes alone are the key of most: a tuple takes longer to make and to hash.
            key: Hashable = item.packed_ids
            is_plain = type_ids is None and schema is None and output == "pooled"
            if not is_plain or skipped or unseen:
                types = None if type_ids is None else tuple(type_ids)
                key = (key, types, skipped, unseen, schema, output)
            if request.image is not None:
                key = request.image.digest
            if (first := sequences.setdefault(key, item)) is item:
                left -= item.num_tokens
            elif first.repeats is None:
                first.repeats = [item]
            else:
                first.repeats.append(item)
        return list(sequences.values())

    def _packed(self, sequences: list[RunningEncoding]) -> Iterable[_Step]:
        """Yield steps of sequences; those of each kind of output have separate steps."""
        kinds = {sequence.request.output for sequence in sequences}
        for kind in sorted(kinds, key=lambda kind: (kind == "pooled", kind)):
            alike = sequences
            if len(kinds) > 1:
                alike = [sequence for sequence in sequences if sequence.request.output == kind]
            counts, most = token_counts(alike), self._step_limit.tokens
            for step in pack_steps(counts, most, self._max_sequences):
                yield _Step([alike[index] for index in step.tolist()])

    def _has_finite_values(self, token_id: int) -> bool:
        """Run a canary of one token; return whether its values are finite."""
        self._num_steps += 1
        launched = self._runner.launch(
            [TokenSequence(EncodingRequest([token_id]), pack_ids([token_id]))]
        )
        return bool(np.isfinite(launched.wait()[0]).all())

    def _finish(
        self,
        sequences: list[RunningEncoding],
        values: Sequence[NDArray[np.float32]] | NDArray[np.float32],
    ) -> list[StepOutput[EncodingResult]]:
        is_finite: list[bool]
        if isinstance(values, np.ndarray):
            flags: NDArray[np.bool_] = np.isfinite(values).all(axis=1)  # type: ignore[assignment]
            is_finite = flags.tolist()
        else:
            is_finite = [bool(np.isfinite(row).all()) for row in values]
        if not any(is_finite):
            run_canaries(self._has_finite_values, self._model.vocab_size)
        finished: list[RunningEncoding] = []
        for sequence, row, is_number in zip(sequences, values, is_finite, strict=True):
            items = [sequence]
            if sequence.repeats or sequence.is_aborted:
                items = sequence.items
                self._cached_tokens += sequence.num_tokens * max(0, len(items) - 1)
            for item in items:
                item.values = row
                if not is_number:
                    item.error = InternalError("The model's output for this request is not finite.")
            finished += items
        self._prompt_tokens += int(token_counts(finished).sum())
        return self._end(finished)

    def _make_room(self, step: _Step, failure: Failure) -> list[StepOutput[EncodingResult]]:
        """Continue with smaller steps after one that did not fit into memory."""
        self._runner.free_memory()
        num_tokens = step.num_tokens
        if len(step.sequences) == 1:
            self._step_limit.restore()
            return self._blame(step.sequences[0], failure)
        self._step_limit.lower(num_tokens)
        logger.warning(
            "a step of %d tokens did not fit into memory: the limit is %d from now on",
            num_tokens,
            self._step_limit.tokens,
        )
        left = [*step.sequences, *(one for step in self._steps for one in step.sequences)]
        self._steps = deque(self._packed(left))
        return []

    def _try_again(self, step: _Step, failure: Failure) -> list[StepOutput[EncodingResult]]:
        """Run a failed step again, then its halves; a request that fails alone is to blame."""
        step.attempts = step.attempts.failed()
        match step.attempts.next_for(len(step.sequences)):
            case "again":
                self._steps.appendleft(step)
            case "halves":
                self._steps.extendleft(reversed(step.halves()))
            case "blame":
                return self._blame(step.sequences[0], failure)
        return []

    def _blame(
        self, sequence: RunningEncoding, failure: Failure
    ) -> list[StepOutput[EncodingResult]]:
        """Fail the requests of a sequence, if a canary step succeeds."""
        refuse_machine_failure(failure)
        run_canaries(self._has_finite_values, self._model.vocab_size)
        error = InternalError(failure.words, code=failure.code)
        items = sequence.items
        for item in items:
            item.error = error
        return self._end(items)

    def _end(self, items: list[RunningEncoding]) -> list[StepOutput[EncodingResult]]:
        """Return the last output of each of some requests."""
        self._num_running -= len(items)
        others: tuple[object, ...] = ([], True, NO_LOGPROBS, NO_LOGPROBS, None)
        return [StepOutput._make((item, *others)) for item in items]
