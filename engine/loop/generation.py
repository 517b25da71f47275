"""Generation task: a model extends sequences step by step; without threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tidemill.protocol.contract import EngineStats
from tidemill.protocol.errors import InternalError, RequestError

from ..scheduling.scheduler import Scheduler
from ..scheduling.sequence import (
    REPETITION_DETECTED,
    Sampling,
    Sequence,
    SequenceRequest,
    SequenceResult,
)
from ..scheduling.step_failures import StepFailures
from ..scheduling.step_plan import StepPlan
from ..scheduling.token_logprobs import NO_LOGPROBS
from .blame import Blame
from .confidence import StepConfidence
from .core import StepOutput
from .deduplication import Deduplicator
from .device_health import Failure, failure_of
from .logprobs import StepLogprobs
from .pipeline import Flight, Pipeline, Unsampled
from .runner import Runner
from .sampler import Masks, MaskThreads, Sampler, with_masks

logger = logging.getLogger(__name__)

_Outputs = list[StepOutput[SequenceResult]]
_T = TypeVar("_T")


class GenerationCore:
    """Sequences in through `add`, outputs out of `step`.

    `steps_ahead` steps, 0 or 1, are in flight while the one before them is collected: with 1 the
    host prepares a step while the device computes another. If constraints of a step depend on the
    previous step's tokens, it samples once these have arrived; in the meantime its layers are
    computed. The output is the same.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        vocab_size: int,
        steps_ahead: int = 0,
        duplicates: Deduplicator | None = None,
    ) -> None:
        self._table = scheduler.table
        self._pool = scheduler.pool
        self._runner = runner
        self._scheduler = scheduler
        self._failures = StepFailures(scheduler)
        self._reliability = self._failures.reliability
        self._blame = Blame(self._failures, runner)
        self._duplicates = Deduplicator() if duplicates is None else duplicates
        self._sampler = Sampler(scheduler.table, runner.paged_ids)
        self._masks = MaskThreads(scheduler.table, vocab_size)
        self._steps_ahead = steps_ahead
        self._pipeline = Pipeline()
        self._vocab_size = vocab_size
        # True for every stop token of any sequence: most steps then check no sets.
        self._may_stop = np.zeros(vocab_size, np.bool_)
        self._collected_at = 0.0
        self._num_added = 0
        self._num_steps = 0
        self._prefilled_tokens = self._attended_tokens = 0
        self._scheduling_seconds = self._launch_seconds = self._token_seconds = 0.0
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0

    def add(self, request: SequenceRequest) -> Sequence:
        """Queue one sequence; raise `RequestError` if it can never run here."""
        prompt, most = len(request.prompt_ids), self._table.max_model_len
        if not 0 < prompt <= most:
            raise RequestError(
                f"The prompt has {prompt} tokens; the number must be between 1 and {most}.",
                code="context_length_exceeded",
            )
        total = min(prompt + request.max_tokens, most)
        if not self._scheduler.can_ever_fit(total):
            room = self._pool.num_pages * self._table.page_size
            raise RequestError(
                f"The request needs up to {total} tokens, but the KV cache holds {room}: reduce "
                "max_tokens, or increase --kv-cache-memory.",
                param="max_tokens",
                code="kv_cache_exceeded",
            )
        sequence = Sequence(request, self._num_added, self._vocab_size)
        self._num_added += 1
        stops = [i for i in request.stop_token_ids if 0 <= i < len(self._may_stop)]
        self._may_stop[stops] = True
        if not self._duplicates.join(sequence):
            self._scheduler.add(sequence)
        return sequence

    def step(self) -> _Outputs | None:
        """Launch a step, collect one, or both; None if there is nothing to do.

        Raises `DeviceFailed` if steps fail and no sequence is to blame.
        """
        blame = self._blame
        if (blame.postponed or blame.accused) and (outputs := self._settle_blame()) is not None:
            return outputs
        began = time.perf_counter()
        part = self._failures.next_part() if self._failures.is_open else None
        plan = part or self._scheduler.plan()
        planned = time.perf_counter()
        self._scheduling_seconds += planned - began
        if plan is None:
            return self._collect_oldest() if self._pipeline else None
        self._count(plan)
        waits = self._awaits_ids(plan)
        flight = _attempt(partial(self._run if waits else self._launch, plan))
        self._launch_seconds += time.perf_counter() - planned
        if isinstance(flight, Failure):
            outputs = self._collect_all()  # earlier steps, which the failure does not affect
            self._scheduler.rewind(plan)
            return self._fail(flight, plan, outputs)
        self._scheduler.launch(plan)
        self._pipeline.append(flight)
        if waits:
            return self._sample_late(self._collect_oldest())
        is_due = part is not None or len(self._pipeline) > self._steps_ahead
        return self._collect_oldest() if is_due else []

    def abort(self, unwanted: AbstractSet[object]) -> None:
        """Drop sequences at any stage; they yield no more events."""
        self._blame.forget(unwanted)
        unjoined = self._duplicates.drop(unwanted)
        self._scheduler.drop(unwanted)
        for sequence in unjoined:
            self._scheduler.add(sequence)

    def stats(self) -> EngineStats:
        """Return counts of running, waiting and finished work; callable from another thread.

        Raises `EngineError` if no further step can run, so that callers notice without a request.
        """
        self._runner.check()
        running = int(self._table.is_running.sum())
        num_used = self._pool.num_pages - self._pool.num_free
        drafts = self._scheduler.drafts
        capture_seconds = self._runner.capture_seconds
        return EngineStats(
            running=running,
            waiting=self._scheduler.num_waiting + len(self._duplicates),
            kv_cache_usage=num_used / self._pool.num_pages,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            preemptions=self._scheduler.num_preemptions,
            prefilled_tokens=self._prefilled_tokens,
            attended_tokens=self._attended_tokens,
            steps=self._num_steps,
            layers=self._runner.num_layers,
            failures=self._blame.num_failures,
            draft_tokens=0 if drafts is None else drafts.num_tokens,
            accepted_tokens=0 if drafts is None else drafts.num_accepted,
            scheduling_seconds=self._scheduling_seconds,
            launch_seconds=max(0.0, self._launch_seconds - capture_seconds),
            capture_seconds=capture_seconds,
            token_seconds=self._token_seconds,
        )

    def _settle_blame(self) -> _Outputs | None:
        """Follow up the postponed failure and judge the accused; None if there are none."""
        self._blame.follow_up_postponed()
        if not self._blame.accused:
            return None
        if self._pipeline:
            return self._collect_all()
        accused = self._blame.judge(self._has_finite_logits, self._vocab_size)
        return [output for sequence in accused for output in self._ended(sequence)]

    def _count(self, plan: StepPlan) -> None:
        self._num_steps += 1
        self._prefilled_tokens += plan.num_tokens - plan.num_decoded_tokens
        self._attended_tokens += plan.num_attended_tokens

    def _awaits_ids(self, plan: StepPlan) -> bool:
        """Return whether constraints of a step depend on tokens of a step in flight."""
        if not self._pipeline:
            return False
        table, slots = self._table, plan.sampled
        is_unknown = table.num_known_ids[slots] < table.num_tokens[slots]
        return bool((table.is_constrained[slots] & is_unknown).any())

    def _launch(self, plan: StepPlan) -> Flight:
        masks = self._masks.start(plan)
        try:
            flight = self._run(plan)
        finally:
            masks.wait()
        self._sample(flight, masks)
        return flight

    def _run(self, plan: StepPlan) -> Flight:
        """Launch a step's layers, and gather its sampling parameters in the meantime."""
        launched_at = time.monotonic()
        logits = self._runner.run(plan)
        wanted = logits.rows(plan.sampled_rows)
        places = plan.sampled_places if plan.has_drafts else 0
        sampling = self._sampler.metadata(plan.sampled, wanted.shape[1], places)
        logprobs = StepLogprobs(plan, self._scheduler) if self._wants_logprobs(plan) else None
        return Flight(plan, launched_at, logprobs, Unsampled(logits, wanted, sampling))

    def _sample(self, flight: Flight, masks: Masks) -> None:
        """Choose the tokens of a step, and start copying its results to the host."""
        assert flight.unsampled is not None
        logits, wanted, sampling = flight.unsampled
        sampled = self._sampler.sample(wanted, with_masks(sampling, masks))
        if self._steps_ahead:  # the next step runs before the host has these ids
            self._runner.store_sampled(flight.plan.sampled, sampled.token_ids)
        logprobs = flight.logprobs
        scored = () if logprobs is None else logprobs.compute(logits, wanted, sampled.token_ids)
        if self._table.reads_confidence[flight.plan.sampled].any():
            confidence = StepConfidence(flight.plan, self._table, masks, wanted.shape[1])
            scored = [*scored, *confidence.compute(wanted, sampled.token_ids)]
            flight.confidence = confidence
        flight.readout = self._runner.read_out([*sampled, *scored])
        flight.failed, flight.unsampled = masks.failed, None

    def _sample_late(self, outputs: _Outputs) -> _Outputs:
        """Choose the tokens of the newest step, now that the previous step's have arrived."""
        if not self._pipeline:  # lost with the previous step
            return outputs
        flight = self._pipeline[-1]
        masks = self._masks.start(flight.plan)
        masks.wait()
        failure = _attempt(partial(self._sample, flight, masks))
        if failure is None:
            return outputs
        self._pipeline.pop()
        self._scheduler.undo(flight.plan)
        return self._fail(failure, flight.plan, outputs)

    def _fail(self, failure: Failure, plan: StepPlan, outputs: _Outputs) -> _Outputs:
        """Follow up a failure, after `outputs` of earlier steps are reported."""
        if outputs:
            self._blame.postponed = failure, [plan]
        else:
            self._blame.follow_up(failure, [plan])
        return outputs

    def _wants_logprobs(self, plan: StepPlan) -> bool:
        """Return whether a sequence requests log-probabilities of its new token or prompt."""
        return bool(plan.is_scored.any() or (self._table.logprobs[plan.sampled] >= 0).any())

    def _collect_oldest(self) -> _Outputs:
        readout = self._pipeline[0].readout
        assert readout is not None
        began = time.perf_counter()
        arrived = _attempt(readout.wait)
        self._token_seconds += time.perf_counter() - began
        if isinstance(arrived, Failure):
            lost = self._pipeline.lose()
            for plan in reversed(lost):
                self._scheduler.undo(plan)
            self._blame.follow_up(arrived, lost)
            return []
        return self._process_outputs(self._pipeline.popleft(), *arrived)

    def _collect_all(self) -> _Outputs:
        outputs = []
        while self._pipeline:
            outputs += self._collect_oldest()
        return outputs

    def _process_outputs(
        self,
        flight: Flight,
        token_ids: NDArray[np.int64],
        is_broken: NDArray[np.bool_],
        *scored: NDArray[Any],
    ) -> _Outputs:
        """Record a step's results; finish sequences that failed, stopped or reached a limit."""
        table, plan, slots = self._table, flight.plan, flight.plan.sampled
        is_lost = is_broken.copy()
        is_lost[list(flight.failed)] = True
        is_valid = ~is_lost
        drafts = self._scheduler.drafts
        if drafts is not None and plan.has_drafts:
            is_right = drafts.verify(plan, token_ids, is_lost)
            is_lost &= is_right  # errors after a wrong draft do not matter
            is_valid = is_right & ~is_lost
        taken = self._scheduler.collect(plan, token_ids, is_valid)
        is_done = (table.num_known_ids[slots] >= table.max_tokens[slots]) | is_lost
        is_done &= table.is_running[slots]
        if plan.has_drafts:
            is_done &= _is_last(plan, taken) | is_lost
        self._end_stopped(slots, token_ids, taken, is_done)
        self._output_tokens += int(taken.sum())
        if scored:
            flight.keep_scores(scored, token_ids, taken)
        emitted = np.flatnonzero(taken & ~is_done & table.is_streamed[slots])
        outputs = []
        for slot, token_id in zip(
            slots[emitted].tolist(), token_ids[emitted].tolist(), strict=True
        ):
            outputs.append(_next_output(table.sequence(slot), [token_id], is_finished=False))
        # Sequences with the same prefix would read invalid state.
        broken = slots[is_done & is_broken]
        self._scheduler.invalidate_from(broken, np.zeros_like(broken))
        for row in np.flatnonzero(is_done).tolist():
            leave = self._scheduler.discard if is_broken[row] else self._scheduler.finish
            sequence = leave(int(slots[row]))
            self._prompt_tokens += len(sequence.request.prompt_ids)
            self._cached_tokens += sequence.num_cached_tokens
            if is_broken[row]:
                sequence.error = InternalError(
                    "The model's logits for this request are not finite."
                )
            elif row in flight.failed:
                sequence.error = flight.failed[row]
            if is_broken.all():  # no row shows that the device works
                self._blame.accused.append(sequence)
            else:
                outputs += self._ended(sequence)
        if self._failures.is_open:
            self._failures.note_success()
        else:
            self._reliability.num_good += 1
        now = time.monotonic()
        self._scheduler.note_seconds(flight.plan, now - max(flight.launched_at, self._collected_at))
        self._collected_at = now
        return outputs

    def _end_stopped(
        self,
        slots: NDArray[np.int64],
        token_ids: NDArray[np.int64],
        taken: NDArray[np.bool_],
        is_done: NDArray[np.bool_],
    ) -> None:
        """Mark the tokens that end sequences as done; later tokens are not `taken`."""
        may_stop = self._may_stop[token_ids] | self._table.is_watched[slots]
        for row in np.flatnonzero(taken & may_stop).tolist():
            if not taken[row]:
                continue
            slot, end = int(slots[row]), row + 1
            while end < len(slots) and slots[end] == slot:
                end += 1
            num_behind = int(taken[row + 1 : end].sum())
            if self._has_stopped(slot, int(token_ids[row]), num_behind):
                self._table.num_known_ids[slot] -= num_behind
                taken[row + 1 : end] = is_done[row + 1 : end] = False
                is_done[row] = True

    def _has_finite_logits(self, token_id: int) -> bool:
        """Run a canary of one token; return whether its logits are finite."""
        self._num_steps += 1
        canary = Sequence(SequenceRequest([token_id], 1, Sampling(temperature=0)), -1)
        plan = self._scheduler.plan_alone(canary)
        try:
            readout = self._launch(plan).readout
            assert readout is not None
            _, is_broken, *_ = readout.wait()
        finally:
            self._scheduler.discard(int(plan.slots[0]))
        return not is_broken.any()

    def _ended(self, sequence: Sequence) -> _Outputs:
        """Return the last events of a sequence and of its duplicates."""
        self._scheduler.note_end(sequence)
        repeats, unjoined = self._duplicates.settle(sequence)
        for repeat in repeats:
            self._prompt_tokens += len(repeat.request.prompt_ids)
            self._cached_tokens += repeat.num_cached_tokens
            self._output_tokens += len(repeat.generated)
        for other in unjoined:
            self._scheduler.add(other)
        return [_last_output(one) for one in (sequence, *repeats)]

    def _has_stopped(self, slot: int, token_id: int, num_behind: int = 0) -> bool:
        """Return whether a sequence ends with a new token, for any reason.

        `num_behind` tokens, the correct drafts, follow it already.
        """
        sequence = self._table.sequence(slot)
        num_generated = len(self._table.generated(slot)) - num_behind
        is_early = num_generated < sequence.request.min_tokens
        reason: int | str | None = None
        try:
            if sequence.stop_watch is not None:
                reason = sequence.stop_watch.push(token_id)
            watch, constraint = sequence.repetition_watch, sequence.constraint_state
            repeats = watch is not None and watch.push(token_id)
            is_whole = constraint is not None and constraint.push(token_id)
        except RequestError as error:
            sequence.error = error
            return True
        except Exception as exc:
            logger.exception("a stop condition failed")
            sequence.error = InternalError(f"A stop condition failed: {exc!r}")
            return True
        if token_id in sequence.request.stop_token_ids:
            reason = token_id
        if not is_whole and (is_early or (reason is None and not repeats)):
            return False
        has_stopped = is_whole or reason is not None
        sequence.finish_reason = "stop" if has_stopped else "repetition"
        sequence.stop_reason = reason if has_stopped else REPETITION_DETECTED
        return True


def _attempt(call: Callable[[], _T]) -> _T | Failure:
    """Return the result of a call, or its failure; `device_health.attempt` for the hot path.

    A step that succeeds enters no failure module (tests/bench/test_ways.py).
    """
    try:
        return call()
    except Exception as exc:  # noqa: BLE001 - returned as a Failure, and logged
        return failure_of(exc)


def _is_last(plan: StepPlan, taken: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Mark each sequence's last taken token in `plan.sampled`, or its first if none was taken."""
    places = plan.sampled_places
    is_followed = np.append(taken[1:] & (places[1:] > 0), False)
    is_last: NDArray[np.bool_] = ~is_followed & (taken | (places == 0))
    return is_last


def _next_output(
    sequence: Sequence, new_token_ids: list[int], *, is_finished: bool
) -> StepOutput[SequenceResult]:
    """Return the event of the tokens after those already emitted."""
    first = sequence.num_emitted
    sequence.num_emitted += len(new_token_ids)
    return StepOutput(
        sequence,
        new_token_ids,
        is_finished,
        sequence.logprobs.part(first, sequence.num_emitted),
        sequence.prompt_logprobs.part(0, len(sequence.prompt))
        if not first and sequence.request.prompt_logprobs is not None
        else NO_LOGPROBS,
    )


def _last_output(sequence: Sequence) -> StepOutput[SequenceResult]:
    return _next_output(sequence, sequence.generated[sequence.num_emitted :], is_finished=True)
