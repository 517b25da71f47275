"""One step on the device: a plan in, the logits of its rows out, and results back to the host."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.attention import AttentionBackend
from ..kernels.sampling import PagedTokenIds
from ..kernels.step import Step, slot_stride
from ..model.network.loaded_model import LoadedModel, NetworkWithHead, VisionEncoder
from ..scheduling.images import PromptImage, image_span
from ..scheduling.step_plan import StepPlan
from ..scheduling.table import SequenceTable
from ..state.groups import NO_PAGE, Pages, StateGroup
from ..state.rows import Rows
from .cuda_graphs import CudaGraphs
from .device_health import probe
from .device_tokens import DeviceTokens
from .step_logits import ExactLogits, StepLogits

# Cache size for images in several chunks, choices or requests; dropped ones are encoded again.
MAX_KEPT_BYTES = 2**28


class StepImages(NamedTuple):
    """Images of a plan: arrays of its `Step` by their names, and the embeddings."""

    arrays: dict[str, NDArray[Any]]
    vectors: Tensor | None


class ImageEmbeddings:
    """Encodes the images of steps one by one, so that no result depends on other images.

    A cache keeps up to `max_bytes` of the most recently used embeddings.
    """

    def __init__(
        self,
        vision_encoder: VisionEncoder,
        table: SequenceTable,
        *,
        max_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._sight, self._tower = vision_encoder
        self._table = table
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._cache: OrderedDict[bytes, Tensor] = OrderedDict()  # by digest, the last used last

    def embed(self, plan: StepPlan) -> StepImages | None:
        """Return a plan's images; None if none of its sequences has an image."""
        has_images = self._table.has_images[plan.slots]
        if not has_images.any():
            return None
        lengths = plan.stops - plan.starts
        first = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) - np.repeat(first - plan.starts, lengths)
        axes, ends = np.tile(positions, (3, 1)), positions + 1
        rows, vectors = [], []
        for span in np.flatnonzero(has_images).tolist():
            start, stop = int(plan.starts[span]), int(plan.stops[span])
            sequence = self._table.sequence(int(plan.slots[span]))
            assert sequence.axes is not None
            shown = image_span(sequence.request.images, sequence.axes, start, stop)
            place = int(first[span])
            axes[:, place : place + stop - start] = shown.axes
            ends[place : place + stop - start] = shown.ends
            rows.append(place + shown.rows)
            vectors += [self._vectors(image)[i:j] for image, i, j in shown.parts]
        arrays: dict[str, NDArray[Any]] = {}
        if self._sight.has_axes:
            arrays["axes"] = axes.ravel()
        if vectors:
            arrays["shown_rows"] = np.concatenate(rows)
        if vectors and self._sight.is_bidirectional:
            arrays["ends"] = ends
        return StepImages(arrays, torch.cat(vectors) if vectors else None)

    def clear(self) -> None:
        """Drop all cached embeddings."""
        self._cache.clear()
        self._num_bytes = 0

    def _vectors(self, image: PromptImage) -> Tensor:
        vectors = self._cache.get(image.digest)
        if vectors is None:
            vectors = self._cache[image.digest] = self._tower.encode(image.pixels)
            self._num_bytes += vectors.nbytes
            while self._num_bytes > self._max_bytes and len(self._cache) > 1:
                self._num_bytes -= self._cache.popitem(last=False)[1].nbytes
        self._cache.move_to_end(image.digest)
        return vectors


class Readout:
    """Results of a step, copied to the host after the step itself, in one transfer."""

    def __init__(self, tensors: Sequence[Tensor], check: Callable[[], None] | None = None) -> None:
        """Start the copy; `check` raises after its arrival if the results are invalid."""
        self._check = check
        self._host = list(tensors)
        self._arrival: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self._host = copy_to_host(tensors)
            self._arrival = torch.cuda.current_stream().record_event()

    def wait(self) -> list[NDArray[Any]]:
        """Return the tensors as arrays once they have arrived; raise the step's error, if any.

        It does not wait for later steps.
        """
        if self._arrival is not None:
            self._arrival.synchronize()
        if self._check is not None:
            self._check()
        return [tensor.numpy() for tensor in self._host]


def copy_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors' host copies, valid once the single copy of all bytes is done."""
    parts = [tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors]
    # The widest first: each then begins at a multiple of its item size.
    order = sorted(range(len(parts)), key=lambda place: -tensors[place].itemsize)
    together = parts[0] if len(parts) == 1 else torch.cat([parts[place] for place in order])
    arriving = torch.empty_like(together, device="cpu", pin_memory=together.is_cuda)
    arriving.copy_(together, non_blocking=True)
    pieces = torch.split(arriving, [len(parts[place]) for place in order])
    piece_of = dict(zip(order, pieces, strict=True))
    return [
        piece_of[place].view(tensor.dtype).view(tensor.shape)
        for place, tensor in enumerate(tensors)
    ]


class Runner:
    """Runs steps of one model over its pages."""

    def __init__(
        self,
        model: LoadedModel,
        attention: AttentionBackend,
        table: SequenceTable,
        graphs: CudaGraphs | None = None,
        *,
        num_kept_pages: int | None = None,
        groups: Sequence[StateGroup] = (),
    ) -> None:
        """Run a model's steps; the device stores the token ids of `num_kept_pages` pages, if given.

        `groups` is the state in addition to the table's pages.
        """
        self._model = model
        network = model.network  # decided once: the check of a protocol takes 35 µs
        self._network_with_head = network if isinstance(network, NetworkWithHead) else None
        self._attention = attention
        self._graphs = graphs
        self._table = table
        self._groups = tuple(groups)
        self._images = (
            None if model.vision_encoder is None else ImageEmbeddings(model.vision_encoder, table)
        )
        self._ids = DeviceTokens.for_table(table, model.device, num_kept_pages)
        self._sampled_slots: Tensor | None = None  # of the step run last, padded

    @property
    def num_layers(self) -> int:
        """Return the number of layers launched so far; callable from another thread."""
        return self._model.network.num_layers_started

    @property
    def capture_seconds(self) -> float:
        """Return the seconds of capturing CUDA graphs so far; callable from another thread."""
        return 0.0 if self._graphs is None else self._graphs.capture_seconds

    @property
    def paged_ids(self) -> PagedTokenIds | None:
        """Return the token ids on the device, None if it does not store them."""
        return self._ids.paged

    def check(self) -> None:
        """Raise an error that ends the engine, if any; callable from any thread."""
        if self._model.check is not None:
            self._model.check()

    def probe(self) -> None:
        """Raise `DeviceFailed` if the device no longer computes."""
        probe(self._model.device)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepLogits:
        """Compute the plan's tokens, writing their keys and values to their pages.

        The logits are those of the plan's spans in order, `plan.num_logits` of each.
        """
        shown = None if self._images is None else self._images.embed(plan)
        arrays = step_arrays(plan, self._table, self._groups)
        if shown is not None:
            arrays |= shown.arrays
        if self._graphs is not None and self._graphs.can_run(arrays):
            step = self._graphs.pack(plan.num_decodes, arrays)
            self._sampled_slots = step.sampled_slots
            hidden, logits = self._graphs.run(step, self._ids)
            return StepLogits(logits, None, self._exact(hidden))
        step = Step.pack(plan.num_decodes, self._model.device, **arrays)
        self._sampled_slots = step.sampled_slots
        if shown is not None:
            step = replace(step, shown=shown.vectors)
        are_known = not _has_unknown_id(plan, self._table).any()
        if not are_known or self._ids.paged is not None:
            step = self._ids.fill_ids(step, are_known=are_known)
        self._attention.prepare(step)
        network = self._network_with_head
        if network is None:
            return StepLogits(self._model.network.forward(step, self._attention))
        if plan.is_scored.any() and self._model.has_head:
            hidden = network.hidden_states(step, self._attention)
            return StepLogits(hidden, network.compute_logits, self._exact(hidden))
        hidden, logits = network.forward_whole(step, self._attention)
        return StepLogits(logits, None, self._exact(hidden))

    def _exact(self, hidden: Tensor) -> ExactLogits | None:
        """Return the function of the exact logits after hidden states, if the network has one."""
        network = self._network_with_head
        assert network is not None
        return partial(network.compute_exact_logits, hidden) if network.has_exact_logits else None

    @torch.inference_mode()
    def store_sampled(self, slots: NDArray[np.int64], token_ids: Tensor) -> None:
        """Store the ids `[N]` that the step's slots sampled, for steps that run before they arrive.

        `slots` are the slots of the last plan, which the device already has.
        """
        assert self._sampled_slots is not None
        self._ids.store(self._sampled_slots[: len(slots)], token_ids)

    def read_out(self, tensors: Sequence[Tensor]) -> Readout:
        """Start copying a step's results to the host."""
        return Readout(tensors, self._model.check)

    def free_memory(self) -> None:
        """Release cached device memory, which may be fragmented."""
        if self._images is not None:
            self._images.clear()
        if self._graphs is not None:
            self._graphs.drop()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()


def step_arrays(
    plan: StepPlan, table: SequenceTable, groups: Sequence[StateGroup] = ()
) -> dict[str, NDArray[Any]]:
    """Return the arrays of a plan's `Step`, each span over its sequence's state.

    A token whose id only the device knows, always the last of a decode, is -1 minus its slot.
    `groups` is the state in addition to the table's pages.
    """
    size = table.page_size
    lengths, page_counts = plan.stops - plan.starts, -(-plan.stops // size)
    query_starts, page_starts = _starts(lengths), _starts(page_counts)
    positions = _runs(plan.starts, lengths, query_starts)
    pages = _read(table.pages, plan.slots, 0, page_counts, page_starts)
    at_pages = np.repeat(page_starts[:-1], lengths) + positions // size  # [T]
    token_ids = _read(table.tokens, plan.slots, plan.starts, lengths, query_starts)
    is_unknown = _has_unknown_id(plan, table)
    token_ids[query_starts[1:][is_unknown] - 1] = -1 - plan.slots[is_unknown]
    first_rows = query_starts[1:] - plan.num_logits
    arrays = {
        "token_ids": token_ids,
        "positions": positions,
        "slots": pages[at_pages] * size + positions % size,
        "query_starts": query_starts,
        "context_lengths": plan.starts,
        "page_starts": page_starts,
        "pages": pages,
        "logit_rows": _runs(first_rows, plan.num_logits, _starts(plan.num_logits)),
        "adapters": table.adapter[plan.slots],
        "sampled_slots": plan.sampled,
    }
    if table.original_positions is not None:
        arrays["long_rope"] = np.repeat(table.has_long_rope[plan.slots], lengths)
    copied = plan.starts_fresh & (table.sources[plan.slots] != NO_PAGE)
    copies = [_copies(plan, copied, table.pages, table.sources, size)] if copied.any() else []
    more_pages, more_slots = [pages], []
    for group in groups:
        if isinstance(group, Rows):
            arrays["state_rows"] = group.rows[plan.slots]
            arrays["state_sources"] = group.sources_of(plan.slots, plan.starts)
        elif isinstance(group, Pages):
            # Released pages are never read: the first live page replaces them.
            places = _runs(np.zeros_like(page_counts), page_counts, page_starts)
            places = np.maximum(places, np.repeat(group.first_live[plan.slots], page_counts))
            own = group.pages[np.repeat(plan.slots, page_counts), places]
            more_pages.append(own)
            more_slots.append(np.zeros(slot_stride(len(positions)), np.int64))
            more_slots[-1][: len(positions)] = own[at_pages] * size + positions % size
            if copies:
                copies.append(_copies(plan, copied, group.pages, group.sources, size))
    if copies:
        arrays["copies"] = np.concatenate(copies)
    if more_slots:
        arrays["pages"] = np.concatenate(more_pages)
        arrays["more_slots"] = np.concatenate(more_slots)
    return arrays


def _copies(
    plan: StepPlan,
    copied: NDArray[np.bool_],
    pages: NDArray[np.int32],
    sources: NDArray[np.int32],
    size: int,
) -> NDArray[np.int64]:
    """Return a group's `Step.copies`: the tokens before each span in `copied [S]`, of its page."""
    slots, starts = plan.slots[copied], plan.starts[copied]
    return np.stack([sources[slots], pages[slots, starts // size], starts % size], axis=1).ravel()


def _has_unknown_id(plan: StepPlan, table: SequenceTable) -> NDArray[np.bool_]:
    """Return for each span `[S]` whether only the device knows its last id; drafts are known."""
    is_unknown: NDArray[np.bool_]
    is_unknown = table.num_known_ids[plan.slots] + plan.num_drafts < plan.stops
    return is_unknown


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the start of each of `S` runs, laid end to end, and the end of all: `[S + 1]`."""
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
    """Return `counts` numbers of each owner's row, from `first`, laid end to end at `starts`."""
    return rows.ravel().take(_runs(owners * rows.shape[1] + first, counts, starts))
