"""One step on the device: a plan in, the logits of its rows out."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.attention import AttentionBackend
from engine.kernels.step import Step
from engine.model.network import LoadedModel
from engine.scheduling.scheduler import StepPlan
from engine.scheduling.table import SequenceTable


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
    def run(self, plan: StepPlan) -> Tensor:
        """Compute the plan's tokens, writing their keys and values to their pages → `[N, V]`.

        The logits are those of the plan's spans in order, `plan.num_logits` of each.
        """
        step = packed(plan, self._table, self._model.device)
        self._attention.prepare(step)
        return self._model.network.forward(step, self._attention)

    def free_memory(self) -> None:
        """Give back what the device's allocator keeps for later: it may lie in pieces too small."""
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()


def packed(plan: StepPlan, table: SequenceTable, device: torch.device) -> Step:
    """Return the step of a plan, each span over its sequence's pages."""
    size = table.page_size
    lengths, page_counts = plan.stops - plan.starts, -(-plan.stops // size)
    query_starts, page_starts = _starts(lengths), _starts(page_counts)
    positions = _runs(plan.starts, lengths, query_starts)
    pages = _read(table.pages, plan.slots, 0, page_counts, page_starts)
    token_pages = pages[np.repeat(page_starts[:-1], lengths) + positions // size]
    first_rows = query_starts[1:] - plan.num_logits
    return Step.pack(
        plan.num_decodes,
        device,
        token_ids=_read(table.tokens, plan.slots, plan.starts, lengths, query_starts),
        positions=positions,
        slots=token_pages * size + positions % size,
        query_starts=query_starts,
        context_lengths=plan.starts,
        page_starts=page_starts,
        pages=pages,
        logit_rows=_runs(first_rows, plan.num_logits, _starts(plan.num_logits)),
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
