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
    query_starts, page_starts = _starts(lengths), _starts(-(-(contexts + lengths) // size))
    token_owners, places = _laid_out(owners, query_starts)  # [T]
    page_owners, indices = _laid_out(owners, page_starts)  # [P]
    positions = places + np.repeat(contexts, lengths)
    return Step.pack(
        num_decodes,
        device,
        token_ids=table.tokens[token_owners, positions],
        positions=positions,
        slots=table.pages[token_owners, positions // size] * size + positions % size,
        query_starts=query_starts,
        context_lengths=contexts,
        page_starts=page_starts,
        pages=table.pages[page_owners, indices],
        logit_rows=logit_rows,
    )


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each of `S` runs starts, laid end to end, and where all end: `[S + 1]`."""
    return np.concatenate([[0], np.cumsum(counts)])


def _laid_out(
    owners: NDArray[np.int64], starts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return of each element of the runs whose it is and its place in the run."""
    counts = np.diff(starts)
    return np.repeat(owners, counts), np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
