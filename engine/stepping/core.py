"""One model working through its sequences, step by step; no threads and no I/O.

A failed step costs no other request: all sequences of the step start over, one alone at a time
until a step of its own went well, and only one that fails alone gets the error. A step that does
not fit into memory is followed by smaller ones, for as long as needed.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from numpy.typing import NDArray

from engine.contract import EngineStats
from engine.protocol.errors import InternalError, RequestError
from engine.scheduling.pages import PagePool
from engine.scheduling.scheduler import Scheduler, StepPlan
from engine.scheduling.sequence import SequenceRequest, SequenceResult, TokenLogprob
from engine.scheduling.table import Sequence, SequenceTable
from engine.stepping.runner import Runner, StepLogits
from engine.stepping.sampler import Sampled, Sampler

logger = logging.getLogger(__name__)

# A failure may pass, or be the size of the batch; one that keeps coming has an owner.
MAX_FAILURES_IN_COMPANY = 3


class Core:
    """Sequences in by `add`, finished ones out of `step`."""

    def __init__(
        self,
        table: SequenceTable,
        pool: PagePool,
        runner: Runner,
        max_num_batched_tokens: int,
        vocab_size: int,
    ) -> None:
        self._table = table
        self._pool = pool
        self._runner = runner
        self._scheduler = Scheduler(table, pool, max_num_batched_tokens)
        self._sampler = Sampler(table)
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

    def step(self) -> list[Sequence] | None:
        """Run one step and return the sequences it finished; None when there is nothing to do."""
        plan = self._scheduler.plan()
        if plan is None:
            return None
        self._num_steps += 1
        sampled: Sampled | None
        try:
            sampled = self._compute(plan)
        except torch.OutOfMemoryError:
            sampled = None
        except Exception as exc:  # noqa: BLE001 - whatever one request does, the others go on
            return self._recover(plan, exc)
        if sampled is None:  # seen to only here, where no frame of the exception holds a tensor
            return self._make_room(plan)
        self._scheduler.bound.note_fit()
        self._scheduler.advance(plan, sampled.token_ids)
        finished = self._collect(plan.sampled, sampled)
        self._acquit(plan)
        return finished

    def abort(self, unwanted: set[Sequence]) -> None:
        """Drop sequences wherever they are; they never come out of `step`."""
        for slot in self._table.running.tolist():
            if self._table.sequence(slot) in unwanted:
                self._scheduler.finish(slot)
        kept = [sequence for sequence in self._scheduler.waiting if sequence not in unwanted]
        self._scheduler.waiting.clear()
        self._scheduler.waiting.extend(kept)

    def stats(self) -> EngineStats:
        """Return what runs, waits and was done; readable from another thread."""
        running = int(self._table.is_running.sum())
        held = self._pool.num_pages - self._pool.num_free
        return EngineStats(
            running=running,
            waiting=len(self._scheduler.waiting),
            kv_cache_usage=held / self._pool.num_pages,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            preemptions=self._scheduler.num_preemptions,
            steps=self._num_steps,
        )

    def _compute(self, plan: StepPlan) -> Sampled:
        logits = self._runner.run(plan)
        sampled = self._sampler.choose(plan.sampled, logits.sampled)
        self._keep_scores(plan, logits, sampled)
        return sampled

    def _keep_scores(self, plan: StepPlan, logits: StepLogits, sampled: Sampled) -> None:
        slots = plan.sampled
        wanted = np.flatnonzero(self._table.logprobs[slots] >= 0)
        if len(wanted):
            tops = self._table.logprobs[slots[wanted]]
            scores = self._sampler.score(logits.sampled[wanted], sampled.token_ids[wanted], tops)
            for slot, score in zip(slots[wanted].tolist(), scores, strict=True):
                self._table.sequence(slot).logprobs.append(score)
        for chunk, rows in logits.scored:
            sequence = self._table.sequence(chunk.slot)
            prompt = self._table.num_prompt_tokens[chunk.slot]
            # Row i scores token start+i+1; the last row of the prompt scores the first new token.
            following = self._table.tokens[
                chunk.slot, chunk.start + 1 : min(chunk.stop + 1, prompt)
            ]
            known = len(sequence.prompt_logprobs) - 1  # nonzero after a preemption
            fresh = following[max(0, known - chunk.start) :].astype(np.int64)
            if not len(fresh):
                continue
            rows_ = rows[len(following) - len(fresh) : len(following)]
            tops = np.full(len(fresh), sequence.request.prompt_logprobs or 0)
            sequence.prompt_logprobs.extend(self._sampler.score(rows_, fresh, tops))

    def _collect(self, slots: NDArray[np.int64], sampled: Sampled) -> list[Sequence]:
        """Finish the sequences that are broken, have stopped, or are as long as they may be."""
        table = self._table
        is_done = table.num_tokens[slots] >= table.max_tokens[slots]
        is_done |= sampled.is_broken
        candidates = self._may_stop[sampled.token_ids] | table.has_stop_text[slots]
        for row in np.flatnonzero(candidates & ~sampled.is_broken).tolist():
            is_done[row] |= self._has_stopped(int(slots[row]), int(sampled.token_ids[row]))
        finished = []
        for row in np.flatnonzero(is_done).tolist():
            sequence = self._scheduler.finish(int(slots[row]))
            if sampled.is_broken[row]:
                self._pool.forget_all()  # else whoever begins alike would read what broke it
                sequence.error = InternalError(
                    "The model's logits for this request are not finite."
                )
            self._count(sequence)
            finished.append(sequence)
        return finished

    def _has_stopped(self, slot: int, token_id: int) -> bool:
        sequence = self._table.sequence(slot)
        request = sequence.request
        if not len(self._table.generated(slot)):  # there was no room for the token
            return False
        is_early = len(self._table.generated(slot)) < request.min_tokens
        reason: int | str | None = None
        if request.stop_text is not None:
            try:
                reason = request.stop_text.push(token_id)
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

    def _recover(self, plan: StepPlan, exc: Exception) -> list[Sequence]:
        """Start the step's sequences over, each alone; fail the one that was alone already."""
        logger.error("a step of %d sequences failed", len(plan.slots), exc_info=exc)
        self._pool.forget_all()
        slots = sorted(plan.slots, key=lambda slot: -int(self._table.arrival[slot]))
        if len(slots) == 1 and self._table.sequence(slots[0]).is_accused:
            sequence = self._scheduler.finish(slots[0])
            sequence.error = InternalError(f"The engine failed on this request: {exc}")
            return [sequence]
        for slot in slots:
            sequence = self._table.sequence(slot)
            sequence.is_suspect = sequence.is_accused = True
            sequence.num_failures += 1
            self._scheduler.preempt(slot)
            del sequence.logprobs[len(sequence.generated) :]
        return []

    def _make_room(self, plan: StepPlan) -> list[Sequence]:
        """Let smaller steps follow one that did not fit; fail a sequence that never fits."""
        running = self._table.running.tolist()
        self._runner.free_memory()
        self._pool.forget_all()
        if len(running) == 1 and plan.num_tokens == 1:
            self._scheduler.bound.restore()
            sequence = self._scheduler.finish(running[0])
            sequence.error = InternalError(
                "The engine is out of memory for this request, even when it runs alone.",
                code="out_of_memory",
            )
            return [sequence]
        for slot in running:
            del self._table.sequence(slot).logprobs[len(self._table.generated(slot)) :]
        for sequence in self._scheduler.make_room(plan):
            sequence.num_failures += 1
            sequence.is_suspect |= sequence.num_failures >= MAX_FAILURES_IN_COMPANY
        logger.warning(
            "a step of %d tokens did not fit into memory: at most %d from now on",
            plan.num_tokens,
            self._scheduler.bound.tokens,
        )
        return []

    def _acquit(self, plan: StepPlan) -> None:
        """Let a suspect whose step alone went well run with others again, if not for ever."""
        if len(plan.decodes) + len(plan.chunks) > 1:
            return
        (slot,) = plan.slots
        if not self._table.is_running[slot] or not self._table.sequence(slot).is_suspect:
            return
        sequence = self._table.sequence(slot)
        if sequence.num_failures < MAX_FAILURES_IN_COMPANY:
            sequence.is_suspect = sequence.is_accused = False
            self._scheduler.stand_behind_suspects(slot)

    def _count(self, sequence: Sequence) -> None:
        self._prompt_tokens += len(sequence.request.prompt_ids)
        self._cached_tokens += sequence.num_cached_tokens
        self._output_tokens += len(sequence.generated)


def result(sequence: Sequence) -> SequenceResult:
    """Return what a finished sequence came to; raises its error if it failed."""
    if sequence.error is not None:
        raise sequence.error
    request = sequence.request
    scores: list[TokenLogprob] | None = None
    if request.sampling.logprobs is not None:
        scores = sequence.logprobs[: len(sequence.generated)]
    return SequenceResult(
        token_ids=sequence.generated,
        finish_reason="stop" if sequence.stopped else "length",
        stop_reason=sequence.stop_reason,
        num_cached_tokens=sequence.num_cached_tokens,
        logprobs=scores,
        prompt_logprobs=sequence.prompt_logprobs if request.prompt_logprobs is not None else None,
    )
