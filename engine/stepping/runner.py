"""One step on the device: a plan in, the logits of its sampled and scored rows out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.packed import Chunk, PackedStep
from engine.model.cache import KVCache
from engine.model.forward import LoadedModel, PagedAttention
from engine.scheduling.scheduler import PromptChunk, StepPlan
from engine.scheduling.table import SequenceTable


class StepLogits(NamedTuple):
    """`sampled [N, V]` in the order of `plan.sampled`; `scored`: chunks and their rows `[t, V]`."""

    sampled: Tensor
    scored: list[tuple[PromptChunk, Tensor]]


class Runner:
    """Runs steps of one model over one cache."""

    def __init__(self, model: LoadedModel, cache: KVCache, table: SequenceTable) -> None:
        self._model = model
        self._table = table
        self._paged = PagedAttention(model.layers, model.shapes, cache)

    @property
    def num_layers(self) -> int:
        """Return how many layers were begun since the start; readable from another thread."""
        return self._paged.num_calls

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepLogits:
        """Compute the plan's tokens, writing their keys and values to the cache."""
        slots, positions = self._positions(plan)
        rows, scored = self._logit_rows(plan)
        step = self._packed(plan, slots, positions)
        logits = self._model.forward(
            self._tensor(self._table.tokens[slots, positions].astype(np.int64)),
            self._tensor(positions),
            self._tensor(rows),
            self._paged.over(step),
        )
        num_sampled = len(rows) - sum(chunk.stop - chunk.start for chunk in scored)
        parts = torch.split(logits[num_sampled:], [chunk.stop - chunk.start for chunk in scored])
        return StepLogits(logits[:num_sampled], list(zip(scored, parts, strict=True)))

    def free_memory(self) -> None:
        """Give back what the device's allocator keeps for later: it may lie in pieces too small."""
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _positions(self, plan: StepPlan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Lay the packed tokens out: each one's slot and position, `[T]` both."""
        table = self._table
        lengths = [chunk.stop - chunk.start for chunk in plan.chunks]
        owners = np.repeat(np.array([chunk.slot for chunk in plan.chunks], np.int64), lengths)
        ranges = [np.arange(chunk.start, chunk.stop) for chunk in plan.chunks]
        slots = np.concatenate([plan.decodes, owners])
        positions = np.concatenate([table.num_tokens[plan.decodes] - 1, *ranges])
        return slots, positions

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

    def _packed(
        self, plan: StepPlan, slots: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> PackedStep:
        table = self._table
        size = table.page_size
        num_decodes = len(plan.decodes)
        most = int(table.num_pages[plan.decodes].max()) if num_decodes else 0
        chunks = []
        start = num_decodes
        for chunk in plan.chunks:
            stop = start + chunk.stop - chunk.start
            pages = table.pages[chunk.slot, : -(-chunk.stop // size)].astype(np.int64)
            chunks.append(Chunk(start, stop, chunk.start, self._tensor(pages)))
            start = stop
        return PackedStep(
            num_decodes=num_decodes,
            token_pages=self._tensor(table.pages[slots, positions // size].astype(np.int64)),
            token_offsets=self._tensor(positions % size),
            decode_pages=self._tensor(table.pages[plan.decodes, :most]),
            decode_lengths=self._tensor(table.num_tokens[plan.decodes].astype(np.int32)),
            chunks=tuple(chunks),
        )

    def _tensor(self, values: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(values).to(self._model.device)
