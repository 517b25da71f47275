"""CUDA graphs of small steps: a step's launches are captured once and then replayed.

Steps up to a certain number of tokens, a bucket, that launch the same kernels share one graph,
which computes everything except the step's head. Their arrays have fixed sizes at fixed addresses:
tokens of no sequence fill up the bucket. The first step with certain kernels is launched without a
graph and captured afterwards; the largest bucket is captured first ([ADR
54](../../docs/adr/0054-cuda-graphs.md)).
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.protocol.contract import EngineError

from ..kernels.attention import (
    ANY_PROGRAMS,
    AttentionBackend,
    AttentionShape,
    CapturableBackend,
)
from ..kernels.recurrence import RecurrentShape
from ..kernels.step import StaticArrays, Step, slot_stride
from ..model.config.device import matmul_flops
from ..model.network.loaded_model import GraphLimits, LoadedModel, NetworkWithHead
from ..scheduling.table import SequenceTable
from .device_tokens import DeviceTokens
from .launch_cost import layer_seconds

logger = logging.getLogger(__name__)

# Buckets per octave, which limits the share of tokens that only fill up a bucket.
BUCKETS_AN_OCTAVE = 8
SMALLEST_STRIDE = 8
# Limit on the page numbers of a step's spans, laid end to end: 64 MB.
MOST_PAGES = 2**24
# At this number of graphs, each some hundreds of KB, a bucket's next one serves all its steps.
MOST_GRAPHS = 128
# Steps of one number of programs after which they get their own graph. A graph costs about 60 ms to
# capture, and programs without a tile 1 to 3 ms per step.
REPEATS = 20

# Relative L2 distance of a replayed step's hidden states from those of the launched one: a captured
# product may use another algorithm, which rounds differently; a stale address yields noise.
REPLAY_TOLERANCE = 0.1

Arrays = Mapping[str, NDArray[Any]]


class Graph(Protocol):
    """A captured computation; a replay reads the current contents of its addresses."""

    def replay(self) -> None:
        """Launch it."""


# Captures a function's launches; returns the graph and the tensor that it writes its result to.
Capture = Callable[[Callable[[], Tensor]], tuple[Graph, Tensor]]


class CudaCapture:
    """Captures one set of graphs on a CUDA device; they run one at a time, and share a memory pool.

    They are destroyed together: with any of them torch frees the cuBLAS workspace of its capture
    stream, which the others would still write to. So each set has its own stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._num_reserved: int | None = None  # bytes, by the allocator, after the last capture

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """Capture; see `Capture`."""
        if self._num_reserved is None:
            # The allocator cannot release cached memory during a capture; it would fail instead.
            # The first graph is the largest: later ones find room in the pool.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        # A capture runs nothing, so it waits for nothing that was launched before.
        with torch.cuda.stream(self._stream):
            # In the meantime other threads may call the device.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = compute()
            except BaseException:
                with suppress(RuntimeError):  # the capture is already invalid
                    graph.capture_end()
                raise
            graph.capture_end()
        self._num_reserved = torch.cuda.memory_reserved()
        if self._num_reserved > before:
            logger.info("a CUDA graph reserves %d MiB", (self._num_reserved - before) >> 20)
        return graph, result


def capture_on(device: torch.device) -> Capture | None:
    """Return an object that captures one set of graphs; None if the device does not support it."""
    return CudaCapture(device) if device.type == "cuda" else None


def make_graphs(
    model: LoadedModel,
    attention: AttentionBackend,
    table: SequenceTable,
    max_tokens: int,
    captures: Capture | None,
) -> CudaGraphs | None:
    """Return the graphs of a model's steps of up to `max_tokens`; None if none is captured."""
    network = model.network
    if (
        captures is None
        or not isinstance(network, NetworkWithHead)
        or not isinstance(attention, CapturableBackend)
    ):
        return None
    return CudaGraphs(
        model,
        network,
        attention,
        most_tokens=min(max_graph_tokens(model), max_tokens),
        most_pages=min(table.pages.size * len(model.layer_groups), MOST_PAGES),
        num_slots=len(table.sequences),
        captures=captures,
        has_ranks=model.check is not None,
    )


class ModelSizes(Protocol):
    """The sizes of a model's layers, and its device."""

    @property
    def shapes(self) -> Sequence[AttentionShape]:
        """Return the attention of each layer."""

    @property
    def recurrent_shapes(self) -> Sequence[RecurrentShape]:
        """Return the state of each recurrent layer."""

    @property
    def hidden_size(self) -> int:
        """Return the width of hidden states."""

    @property
    def max_intermediate_size(self) -> int:
        """Return the width of the widest MLP."""

    @property
    def device(self) -> torch.device:
        """Return the device."""


def max_graph_tokens(model: ModelSizes) -> int:
    """Return the number of tokens above which a layer computes for longer than it is launched."""
    widths = [
        (shape.num_query_heads + shape.num_kv_heads) * (shape.key_dim + shape.value_dim)
        for shape in model.shapes
    ]
    widths += [2 * shape.num_channels for shape in model.recurrent_shapes]
    num_weights = model.hidden_size * (max(widths) + 3 * model.max_intermediate_size)
    seconds = layer_seconds(model.device)
    return max(1, round(seconds * matmul_flops(model.device) / (2 * num_weights)))


def buckets(most: int, smallest_stride: int = SMALLEST_STRIDE) -> Iterator[int]:
    """Yield the bucket sizes, up to the first one of at least `most`."""
    size = 0
    while size < most:
        size += max(smallest_stride, (1 << size.bit_length() >> 1) // BUCKETS_AN_OCTAVE)
        yield size


class CountingNetwork(Protocol):
    """A network that counts the layers that it starts."""

    num_layers_started: int


class _Captured(NamedTuple):
    graph: Graph
    result: Tensor
    num_layers: int


class CapturedSteps:
    """Captured graphs of one network by their kinds; all write their results to one tensor.

    The first step with certain kernels is computed, which loads them, and then captured.
    `compares` is set if that graph is replayed at once: its result must equal the computed one.
    Other kinds with these kernels are captured, and then replayed. If a capture fails, the step is
    computed first; if it fails again, all graphs are dropped with a warning, and steps are computed
    without them.
    """

    def __init__(
        self, captures: Capture, network: CountingNetwork, *, compares: bool = True
    ) -> None:
        self._captures, self._network, self._compares = captures, network, compares
        self._captured: dict[Hashable, _Captured] = {}
        self._loaded: set[Hashable] = set()
        self._result: Tensor | None = None  # of all graphs: as large as the first one
        self.is_dropped = False
        self.capture_seconds = 0.0

    def __len__(self) -> int:
        """Return the number of graphs."""
        return len(self._captured)

    def __contains__(self, kind: Hashable) -> bool:
        """Return whether there is a graph of this kind."""
        return kind in self._captured

    @property
    def is_full(self) -> bool:
        """Return whether a further graph should serve any step of its bucket."""
        return len(self._captured) >= MOST_GRAPHS

    def bucket(self, sizes: Sequence[int], least: int) -> int:
        """Return the first of the ascending sizes that is large enough.

        Before the first capture it is the largest: the memory pool then has room for all others.
        """
        return sizes[bisect_left(sizes, least) if self._captured else -1]

    def run(
        self, kind: Hashable, compute: Callable[[], Tensor], num_rows: int, kernels: Hashable
    ) -> Tensor:
        """Return the first rows of a step's result, valid until the next step.

        The first step of all has the largest result. `kernels` are those that its kind launches.
        """
        if kind not in self._captured and kernels in self._loaded:
            self._capture(kind, compute)
        captured = self._captured.get(kind)
        if captured is not None:
            captured.graph.replay()
            self._network.num_layers_started += captured.num_layers
            return captured.result[:num_rows]
        computed = self._stored(compute())[:num_rows].clone()
        if not self.is_dropped:
            self._capture(kind, compute, computed)
            self._loaded.add(kernels)
        return computed

    def drop(self) -> None:
        """Release all graphs; no more are captured."""
        self._captured.clear()
        self._loaded.clear()
        self._result, self.is_dropped = None, True

    def _stored(self, result: Tensor) -> Tensor:
        if self._result is None:  # before the first capture, which is of the largest step
            self._result = torch.empty_like(result)
        return self._result[: len(result)].copy_(result)

    def _capture(
        self, kind: Hashable, compute: Callable[[], Tensor], computed: Tensor | None = None
    ) -> None:
        """Capture a kind, and compare it with the computed result if there is one."""
        num_begun, began = self._network.num_layers_started, time.perf_counter()
        try:
            graph, result = self._captures(lambda: self._stored(compute()))
            num_layers = self._network.num_layers_started - num_begun
            if self._compares and computed is not None:
                graph.replay()
                check_replay(result[: len(computed)], computed)
            self._captured[kind] = _Captured(graph, result, num_layers)
        except Exception as exc:  # noqa: BLE001 - the step itself is computed in any case
            if computed is None:
                logger.debug("a step is launched before it is captured: %s", exc)
            else:
                logger.warning("CUDA graphs are disabled from now on: %s", exc)
                self.drop()
        self._network.num_layers_started = num_begun
        self.capture_seconds += time.perf_counter() - began


class CudaGraphs:
    """The graphs of one network over one attention backend, for steps of up to `most_tokens`.

    There is no replay after a capture with other ranks, which would wait for a rank that captures
    nothing, nor with recurrent layers, whose rows have already advanced past the step.
    """

    def __init__(
        self,
        model: LoadedModel,
        network: NetworkWithHead,
        attention: CapturableBackend,
        *,
        most_tokens: int,
        most_pages: int,
        num_slots: int,
        captures: Capture,
        has_ranks: bool = False,
    ) -> None:
        self._model, self._network = model, network
        self._attention = attention
        self._buckets = list(buckets(most_tokens))
        self._most_tokens, self._most_pages = most_tokens, most_pages
        self._has_long_rope = model.original_positions is not None
        self._num_groups = len(model.layer_groups)
        self._has_rows = bool(model.recurrent_shapes)
        # Longer sequences select tokens, which is launched (sparse attention); 0: none do.
        self._num_selected = max((shape.num_selected for shape in model.shapes), default=0)
        # Kinds: the bucket's number of tokens, the launched kernels, and their programs.
        self._graphs = CapturedSteps(captures, network, compares=not (has_ranks or self._has_rows))
        self._occurrences: Counter[tuple[int, int, int]] = Counter()
        attention.allocate_workspace(self._buckets[-1], num_slots)
        lengths = {**self._lengths(self._buckets[-1]), "pages": most_pages}
        self._arrays = StaticArrays(lengths, model.device)

    def can_run(self, arrays: Arrays) -> bool:
        """Return whether a step with these arrays can run as a graph."""
        return (
            not self._graphs.is_dropped
            and len(arrays["token_ids"]) <= self._buckets[-1]
            and len(arrays["pages"]) <= self._most_pages
            and arrays.keys() <= {*self._lengths(0), "pages", "adapters"}
            and not arrays["adapters"].any()
            and not (self._num_selected and longest(arrays) > self._num_selected)
        )

    def pack(self, num_decodes: int, arrays: Arrays) -> Step:
        """Return a step from arrays, padded to its bucket's sizes on the device but not in `host`.

        It overwrites the previous step. The first one is padded to the largest bucket, so that the
        memory pool has room for every later graph.
        """
        num_tokens, num_pages = len(arrays["token_ids"]), len(arrays["pages"])
        bucket = self._graphs.bucket(self._buckets, num_tokens)
        filling = {
            "slots": self._attention.trash_slot,
            "query_starts": num_tokens,
            "page_starts": num_pages,
        }
        more: dict[str, NDArray[Any]] = {}
        if "more_slots" in arrays:
            more["more_slots"] = self._further_slots(arrays["more_slots"], num_tokens, bucket)
        lengths = {**self._lengths(bucket), "pages": self._most_pages}
        views, known = self._arrays.fill(bucket, lengths, {**arrays, **more}, filling)
        if more:
            known["more_slots"] = torch.from_numpy(arrays["more_slots"])
        return Step(num_decodes, **views, copy_on_host=Step(num_decodes, **known))

    def run(self, step: Step, ids: DeviceTokens) -> tuple[Tensor, Tensor]:
        """Run a packed step → the hidden states `[N, H]` and the logits `[N, V]` of its rows.

        The next step overwrites the hidden states. `ids` are the same in all calls.
        """
        graphs = GraphLimits(self._most_tokens, self._most_pages, ids.last, self.drop)
        return self._model.run_graph(step, self._attention, graphs, partial(self._run, step, ids))

    def _run(self, step: Step, ids: DeviceTokens) -> tuple[Tensor, Tensor]:
        self._attention.prepare(step)
        num_tokens, launches, programs = self._kind(step.num_tokens)

        def compute() -> Tensor:
            with self._attention.capturing(num_tokens, launches, programs=programs):
                return self._network.hidden_states(ids.fill_ids(step), self._attention)

        kind = num_tokens, launches, programs
        hidden = self._graphs.run(kind, compute, len(step.host.logit_rows), launches)
        return hidden, self._network.compute_logits(hidden)

    def _kind(self, num_tokens: int) -> tuple[int, int, int]:
        """Return the kind of the prepared step's graph: its tokens, kernels and programs.

        A bucket's first graph has programs for any step; frequent steps get one with fewer.
        """
        launches = self._attention.launches
        for_any, own = (
            (num_tokens, launches, ANY_PROGRAMS),
            (num_tokens, launches, self._attention.programs),
        )
        is_full = self._graphs.is_full
        if for_any not in self._graphs:
            return (num_tokens, self._attention.all_launches, ANY_PROGRAMS) if is_full else for_any
        self._occurrences[own] += 1
        is_frequent = self._occurrences[own] > REPEATS and not is_full
        return own if is_frequent or own in self._graphs else for_any

    @property
    def capture_seconds(self) -> float:
        """Return the seconds that captures took."""
        return self._graphs.capture_seconds

    def drop(self) -> None:
        """Release all graphs; no more are captured."""
        self._graphs.drop()

    def _lengths(self, bucket: int) -> dict[str, int]:
        """Return the lengths of a bucket's arrays, except pages, which come last."""
        lengths = {
            "token_ids": bucket,
            "positions": bucket,
            "slots": bucket,
            "query_starts": bucket + 1,
            "context_lengths": bucket,
            "page_starts": bucket + 1,
            "logit_rows": bucket,
            "sampled_slots": bucket,
        }
        if self._has_rows:
            lengths |= {"state_sources": bucket, "state_rows": bucket}
        if self._num_groups > 1:
            lengths["more_slots"] = (self._num_groups - 1) * slot_stride(bucket)
        return lengths | ({"long_rope": bucket} if self._has_long_rope else {})

    def _further_slots(
        self, slots: NDArray[Any], num_tokens: int, bucket: int
    ) -> NDArray[np.int64]:
        """Return the slots of groups after the first, each padded to the bucket."""
        wide = np.full((self._num_groups - 1, slot_stride(bucket)), self._attention.trash_slot)
        by_group = slots.reshape(self._num_groups - 1, slot_stride(num_tokens))
        wide[:, :num_tokens] = by_group[:, :num_tokens]
        return wide.ravel()


def longest(arrays: Arrays) -> int:
    """Return the length of a step's longest sequence, up to its last token."""
    return int((arrays["context_lengths"] + np.diff(arrays["query_starts"])).max())


def check_replay(replayed: Tensor, launched: Tensor) -> None:
    """Raise `EngineError` if the hidden states `[N, H]` of a replay differ from the launched."""
    distance, scale = (replayed.float() - launched.float()).norm(), launched.float().norm()
    if not distance <= REPLAY_TOLERANCE * scale:
        raise EngineError(
            f"a replayed graph computed other values (off by {distance:.2g} of {scale:.2g})"
        )
