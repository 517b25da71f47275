"""Generation, one kind of work: a model goes through its sequences step by step; no threads."""

from __future__ import annotations

import logging
from collections.abc import Set as AbstractSet

import numpy as np
import torch
from numpy.typing import NDArray

from engine.contract import EngineStats
from engine.protocol.errors import InternalError, RequestError
from engine.scheduling.failures import Failures
from engine.scheduling.scheduler import Scheduler, StepPlan
from engine.scheduling.sequence import Sequence, SequenceRequest, SequenceResult
from engine.stepping.runner import Runner
from engine.stepping.sampler import Sampled, Sampler
from engine.stepping.work import Event

logger = logging.getLogger(__name__)

NO_ROOM = "The engine is out of memory for this request, even when it runs alone."


class GenerationWork:
    """Sequences in by `add`, what becomes of them out of `step`."""

    def __init__(self, scheduler: Scheduler, runner: Runner, vocab_size: int) -> None:
        self._table = scheduler.table
        self._pool = scheduler.pool
        self._runner = runner
        self._scheduler = scheduler
        self._failures = Failures(scheduler)
        self._sampler = Sampler(scheduler.table)
        # True for ids that any sequence ever stops at: most steps then need no look at any set.
        self._may_stop = np.zeros(vocab_size, np.bool_)
        self._num_added = 0
        self._num_steps = 0
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0

    def add(self, request: SequenceRequest) -> Sequence:
        """Queue one sequence; `RequestError` when it could never run here."""
        prompt, most = len(request.prompt_ids), self._table.max_model_len
        if not 0 < prompt <= most:
            raise RequestError(
                f"The prompt has {prompt} tokens; between 1 and {most} can be served.",
                code="context_length_exceeded",
            )
        total = min(prompt + request.max_tokens, most)
        if not self._scheduler.can_ever_fit(total):
            room = self._pool.num_pages * self._table.page_size
            raise RequestError(
                f"The request may grow to {total} tokens, but the KV cache holds {room}: lower "
                "max_tokens, or give the engine more memory (--kv-cache-memory).",
                param="max_tokens",
                code="kv_cache_exceeded",
            )
        sequence = Sequence(request, self._num_added)
        self._num_added += 1
        stops = [i for i in request.stop_token_ids if 0 <= i < len(self._may_stop)]
        self._may_stop[stops] = True
        self._scheduler.add(sequence)
        return sequence

    def step(self) -> list[Event[SequenceResult]] | None:
        """Run one step and return what it brought; None when there is nothing to do."""
        plan = self._scheduler.plan()
        if plan is None:
            return None
        self._num_steps += 1
        sampled: Sampled | None
        try:
            sampled = self._compute(plan)
        except torch.OutOfMemoryError:
            sampled = None
        except Exception as exc:  # whatever one request does, the others go on
            logger.exception("a step of %d sequences failed", len(plan.slots))
            culprit = self._failures.start_over(plan)
            if culprit is None:
                return []
            return [_failed(culprit, f"The engine failed on this request: {exc}")]
        if sampled is None:  # seen to only here, where no frame of the exception holds a tensor
            self._runner.free_memory()
            culprit = self._failures.make_room(plan)
            return [] if culprit is None else [_failed(culprit, NO_ROOM, code="out_of_memory")]
        self._output_tokens += self._scheduler.advance(plan, sampled.token_ids)
        events = self._collect(plan.sampled, sampled)
        self._failures.note_success(plan)
        return events

    def abort(self, unwanted: AbstractSet[object]) -> None:
        """Drop sequences wherever they are; no event comes of them any more."""
        self._scheduler.drop(unwanted)

    def stats(self) -> EngineStats:
        """Return what runs, waits and was done; readable from another thread."""
        running = int(self._table.is_running.sum())
        held = self._pool.num_pages - self._pool.num_free
        return EngineStats(
            running=running,
            waiting=self._scheduler.num_waiting,
            kv_cache_usage=held / self._pool.num_pages,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            preemptions=self._scheduler.num_preemptions,
            steps=self._num_steps,
            layers=self._runner.num_layers,
        )

    def _compute(self, plan: StepPlan) -> Sampled:
        logits = self._runner.run(plan)
        rows = plan.sampled_rows
        is_all = len(rows) == len(logits)
        sampled = self._sampler.choose(
            plan.sampled, logits if is_all else logits[torch.from_numpy(rows)]
        )
        self._sampler.keep_scores(plan, sampled, logits)
        return sampled

    def _collect(self, slots: NDArray[np.int64], sampled: Sampled) -> list[Event[SequenceResult]]:
        """Finish the sequences that are broken, have stopped, or are as long as they may be."""
        table = self._table
        is_done = table.num_tokens[slots] >= table.max_tokens[slots]
        is_done |= sampled.is_broken
        candidates = self._may_stop[sampled.token_ids] | table.has_stop_text[slots]
        for row in np.flatnonzero(candidates & ~sampled.is_broken).tolist():
            is_done[row] |= self._has_stopped(int(slots[row]), int(sampled.token_ids[row]))
        streamed = slots[table.is_streamed[slots] & ~is_done].tolist()
        events = [_event(table.sequence(i), table.generated(i).tolist()) for i in streamed]
        for row in np.flatnonzero(is_done).tolist():
            sequence = self._scheduler.finish(int(slots[row]))
            if sampled.is_broken[row]:
                self._pool.forget_all()  # else whoever begins alike would read what broke it
                sequence.error = InternalError(
                    "The model's logits for this request are not finite."
                )
            self._count(sequence)
            events.append(_event(sequence, sequence.generated, is_finished=True))
        return events

    def _has_stopped(self, slot: int, token_id: int) -> bool:
        sequence = self._table.sequence(slot)
        request = sequence.request
        if not len(self._table.generated(slot)):  # there was no room for the token
            return False
        is_early = len(self._table.generated(slot)) < request.min_tokens
        reason: int | str | None = None
        if sequence.stop_watch is not None:
            try:
                reason = sequence.stop_watch.push(token_id)
            except Exception as exc:
                logger.exception("a search for stop strings failed")
                sequence.error = InternalError(f"The search for stop strings failed: {exc!r}")
                return True
        if token_id in request.stop_token_ids:
            reason = token_id
        if reason is None or is_early:
            return False
        sequence.stop_reason = reason
        sequence.stopped = True
        return True

    def _count(self, sequence: Sequence) -> None:
        self._prompt_tokens += len(sequence.request.prompt_ids)
        self._cached_tokens += sequence.num_cached_tokens


def _event(
    sequence: Sequence, generated: list[int], *, is_finished: bool = False
) -> Event[SequenceResult]:
    new_token_ids = generated[sequence.num_told :]
    sequence.num_told = len(generated)
    return Event(sequence, new_token_ids, is_finished)


def _failed(
    culprit: Sequence, words: str, *, code: str = "internal_error"
) -> Event[SequenceResult]:
    """Return the end of a sequence that a failed step is blamed on, with these words as error."""
    culprit.error = InternalError(words, code=code)
    return _event(culprit, culprit.generated, is_finished=True)
