"""One step on the device: a plan in, the logits of its sampled and scored rows out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.attention import AttentionBackend
from engine.kernels.step import Step
from engine.model.network import LoadedModel
from engine.scheduling.scheduler import PromptChunk, StepPlan
from engine.scheduling.table import SequenceTable


class StepLogits(NamedTuple):
    """`sampled [N, V]` in the order of `plan.sampled`; `scored`: chunks and their rows `[t, V]`."""

    sampled: Tensor
    scored: list[tuple[PromptChunk, Tensor]]


class Runner:
    """Runs steps of one model over its pages."""

    def __init__(
        self, model: LoadedModel, attention: AttentionBackend, table: SequenceTable
    ) -> None:
        self._model = model
        self._attention = attention
        self._table = table

    @property
    def num_layers(self) -> int:
        """Return how many layers were begun since the start; readable from another thread."""
        return self._model.network.num_layers_begun

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepLogits:
        """Compute the plan's tokens, writing their keys and values to their pages."""
        rows, scored = self._logit_rows(plan)
        step = packed(plan, rows, self._table, self._model.device)
        self._attention.prepare(step)
        logits = self._model.network.forward(step, self._attention)
        lengths = [chunk.stop - chunk.start for chunk in scored]
        num_sampled = len(rows) - sum(lengths)
        parts = torch.split(logits[num_sampled:], lengths)
        return StepLogits(logits[:num_sampled], list(zip(scored, parts, strict=True)))

    def free_memory(self) -> None:
        """Give back what the device's allocator keeps for later: it may lie in pieces too small."""
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _logit_rows(self, plan: StepPlan) -> tuple[NDArray[np.int64], list[PromptChunk]]:
        """Pick the packed tokens whose logits are needed: sampled first, then scored prompts."""
        num_decodes = len(plan.decodes)
        rows = [np.arange(num_decodes)]
        scores = []
        scored = []
        start = num_decodes
        for chunk in plan.chunks:
            stop = start + chunk.stop - chunk.start
            if chunk.is_last:
                rows.append(np.array([stop - 1]))
            if self._table.sequence(chunk.slot).request.prompt_logprobs is not None:
                scores.append(np.arange(start, stop))
                scored.append(chunk)
            start = stop
        return np.concatenate([*rows, *scores]), scored


def packed(
    plan: StepPlan, logit_rows: NDArray[np.int64], table: SequenceTable, device: torch.device
) -> Step:
    """Return the step of a plan: its decodes, then its chunks, each over its sequence's pages."""
    size, num_decodes = table.page_size, len(plan.decodes)
    chunks = np.array([chunk[:3] for chunk in plan.chunks], np.int64).reshape(-1, 3)
    owners = np.concatenate([plan.decodes, chunks[:, 0]])  # [S] slots of the table
    contexts = np.concatenate([table.num_tokens[plan.decodes] - 1, chunks[:, 1]])
    lengths = np.concatenate([np.ones(num_decodes, np.int64), chunks[:, 2] - chunks[:, 1]])
    page_counts = -(-(contexts + lengths) // size)
    query_starts, page_starts = _starts(lengths), _starts(page_counts)
    positions = _runs(contexts, lengths, query_starts)
    pages = _read(table.pages, owners, 0, page_counts, page_starts)
    token_pages = pages[np.repeat(page_starts[:-1], lengths) + positions // size]
    return Step.pack(
        num_decodes,
        device,
        token_ids=_read(table.tokens, owners, contexts, lengths, query_starts),
        positions=positions,
        slots=token_pages * size + positions % size,
        query_starts=query_starts,
        context_lengths=contexts,
        page_starts=page_starts,
        pages=pages,
        logit_rows=logit_rows,
    )


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each of `S` runs starts, laid end to end, and where all end: `[S + 1]`."""
    return np.concatenate([[0], np.cumsum(counts)])


def _runs(
    first: NDArray[np.int64], counts: NDArray[np.int64], starts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return runs of counting up, each from its `first`, laid end to end at `starts`."""
    return np.arange(starts[-1]) + np.repeat(first - starts[:-1], counts)


def _read(
    rows: NDArray[np.int32],
    owners: NDArray[np.int64],
    first: NDArray[np.int64] | int,
    counts: NDArray[np.int64],
    starts: NDArray[np.int64],
) -> NDArray[np.int32]:
    """Return `counts` numbers of each owner's row, from `first` on, laid end to end at `starts`."""
    return rows.ravel().take(_runs(owners * rows.shape[1] + first, counts, starts))
