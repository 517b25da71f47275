"""CUDA graphs of small steps: a step's launches are captured once and then replayed.

Steps of up to so many tokens, a bucket, that launch the same kernels have one graph, which computes
all but a step's head. Their arrays are brought to fixed sizes at fixed addresses: tokens of no
sequence fill the bucket up. The first such step is launched plainly, and captured behind that; the
largest bucket comes first ([ADR 54](../../docs/adr/0054-cuda-graphs.md)).
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.protocol.contract import EngineError

from ..kernels.attention import AttentionBackend, CapturableBackend
from ..kernels.step import Step, buffer_slices, host_buffer, slot_stride
from ..model.config.device import matmul_flops
from ..model.network.loaded_model import GraphLimits, LoadedModel, NetworkWithHead
from ..scheduling.table import SequenceTable
from .device_tokens import DeviceTokens

logger = logging.getLogger(__name__)

# Buckets of an octave: of the tokens of a full one, at most this share is none's.
BUCKETS_AN_OCTAVE = 8
SMALLEST_STRIDE = 8
# Numbers of pages of a step's spans, one after another: as many as 64 MB hold.
MOST_PAGES = 2**24
# With so many graphs, each some hundreds of kilobytes, a bucket's next one is for all its steps.
MOST_GRAPHS = 128
# What launching a layer takes a host: 1.4 ms beside an H100, less on faster cores.
LAYER_SECONDS = 1e-3

# Relative L2 distance of a replayed step's hidden states from those of the launched one: a product
# may be captured in another form, which rounds otherwise; an address that went stale gives noise.
REPLAY_TOLERANCE = 0.1

Arrays = Mapping[str, NDArray[Any]]


class Graph(Protocol):
    """A computation that was captured, over what lies at its addresses when it is replayed."""

    def replay(self) -> None:
        """Launch it."""


# Captures what a function launches, and returns that with the tensor that it puts its result in.
Capture = Callable[[Callable[[], Tensor]], tuple[Graph, Tensor]]


class CudaCapture:
    """Captures one set of graphs on a CUDA device; they run one at a time, and share a memory pool.

    They are destroyed together: with any of them torch frees the cuBLAS workspace of the stream
    that it was captured on, which the others would still write to. So a set has its own stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._num_reserved: int | None = None  # bytes, by the allocator, after the last capture

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """Capture; see `Capture`."""
        if self._num_reserved is None:
            # The allocator gives back no cached memory while it captures, and fails instead. The
            # first graph is the largest: those to come find room in the pool.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        # A capture runs nothing, so it waits for nothing that was launched before.
        with torch.cuda.stream(self._stream):
            # Other threads may call the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = compute()
            except BaseException:
                with suppress(RuntimeError):  # that the capture is invalid is known
                    graph.capture_end()
                raise
            graph.capture_end()
        self._num_reserved = torch.cuda.memory_reserved()
        if self._num_reserved > before:
            logger.info("a CUDA graph reserves %d MiB", (self._num_reserved - before) >> 20)
        return graph, result


def capture_on(device: torch.device) -> Capture | None:
    """Return what captures one set of graphs on a device, None where nothing does."""
    return CudaCapture(device) if device.type == "cuda" else None


def make_graphs(
    model: LoadedModel,
    attention: AttentionBackend,
    table: SequenceTable,
    max_tokens: int,
    captures: Capture | None,
) -> CudaGraphs | None:
    """Return the graphs of a model's steps of up to `max_tokens`; None where none is captured."""
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


def max_graph_tokens(model: LoadedModel) -> int:
    """Return above how many tokens a device computes a layer for longer than it is launched."""
    widths = [
        (shape.num_query_heads + shape.num_kv_heads) * (shape.key_dim + shape.value_dim)
        for shape in model.shapes
    ]
    widths += [2 * shape.num_channels for shape in model.recurrent_shapes]
    num_weights = model.hidden_size * (max(widths) + 3 * model.max_intermediate_size)
    return max(1, round(LAYER_SECONDS * matmul_flops(model.device) / (2 * num_weights)))


def buckets(most_tokens: int) -> Iterator[int]:
    """Yield the sizes of steps that have a graph, until a step of so many tokens has one."""
    size = 0
    while size < most_tokens:
        size += max(SMALLEST_STRIDE, (1 << size.bit_length() >> 1) // BUCKETS_AN_OCTAVE)
        yield size


class _Captured(NamedTuple):
    graph: Graph
    hidden: Tensor  # [bucket, H]


class CudaGraphs:
    """The graphs of one network over one attention backend, for steps of up to `most_tokens`.

    Where one cannot be captured all are dropped, with a word, and steps are launched plainly.
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
        self._captures, self._has_ranks = captures, has_ranks
        # By the tokens of a bucket, and what is launched.
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._hidden: Tensor | None = None  # [largest bucket, H], the result of all graphs
        self._views: dict[int, dict[str, Any]] = {}  # of buckets: where their arrays lie
        self._has_long_rope = model.original_positions is not None
        self._num_groups = len(model.layer_groups)
        self._has_rows = bool(model.recurrent_shapes)
        attention.allocate_workspace(self._buckets[-1], num_slots)
        lengths = {**self._lengths(self._buckets[-1]), "pages": most_pages}
        most_numbers = buffer_slices(lengths)["pages"].stop
        self._numbers = torch.zeros(most_numbers, dtype=torch.int32, device=model.device)

    def can_run(self, arrays: Arrays) -> bool:
        """Say whether a step of these arrays may be run here."""
        return (
            bool(self._buckets)
            and len(arrays["token_ids"]) <= self._buckets[-1]
            and len(arrays["pages"]) <= self._most_pages
            and arrays.keys() <= {*self._lengths(0), "pages", "adapters"}
            and not arrays["adapters"].any()
        )

    def pack(self, num_decodes: int, arrays: Arrays) -> Step:
        """Return the step of arrays, brought to its bucket's sizes on the device but not in `host`.

        It lies where the one before lay. The first of all is brought to the largest bucket, so that
        the memory pool has room for any graph from the beginning.
        """
        num_tokens, num_pages = len(arrays["token_ids"]), len(arrays["pages"])
        smallest = bisect_left(self._buckets, num_tokens)
        bucket = self._buckets[smallest if self._captured else -1]
        places = buffer_slices({**self._lengths(bucket), "pages": num_pages})
        filling = {
            "slots": self._attention.trash_slot,
            "query_starts": num_tokens,
            "page_starts": num_pages,
        }
        host = host_buffer(places["pages"].stop, self._numbers.device)
        numbers = host.numpy()
        known: dict[str, Any] = {}
        for name, place in places.items():
            if name == "more_slots":
                own = self._further_slots(arrays[name], num_tokens, bucket)
                numbers[place] = own
                known[name] = torch.from_numpy(arrays[name])
                continue
            stop = place.start + len(arrays[name])
            numbers[place.start : stop] = arrays[name]
            numbers[stop : place.stop] = filling.get(name, 0)
            known[name] = host[place.start : stop]
        self._numbers[: len(host)].copy_(host, non_blocking=True)
        if bucket not in self._views:
            self._views[bucket] = {name: self._numbers[place] for name, place in places.items()}
            self._views[bucket]["pages"] = self._numbers[places["pages"].start :]
        views = self._views[bucket]
        return Step(num_decodes, **views, copy_on_host=Step(num_decodes, **known))

    def run(self, step: Step, ids: DeviceTokens) -> Tensor:
        """Run a step that was packed here → the logits `[N, V]` of its rows.

        `ids` are the same in all calls.
        """
        graphs = GraphLimits(self._most_tokens, self._most_pages, ids.last, self.drop)
        return self._model.run_graph(step, self._attention, graphs, partial(self._run, step, ids))

    def _run(self, step: Step, ids: DeviceTokens) -> Tensor:
        self._attention.prepare(step)
        kind = step.num_tokens, self._attention.launches
        if kind not in self._captured and len(self._captured) >= MOST_GRAPHS:
            kind = step.num_tokens, self._attention.all_launches
        captured = self._captured.get(kind)
        if captured is None:
            hidden = self._compute(step, ids, kind).clone()
            self._capture(step, ids, kind, hidden[: len(step.host.logit_rows)])
        else:
            captured.graph.replay()
            self._network.num_layers_started += len(self._model.shapes)
            hidden = captured.hidden
        return self._network.compute_logits(hidden[: len(step.host.logit_rows)])

    def drop(self) -> None:
        """Give back what graphs hold; there are none from now on."""
        self._captured.clear()
        self._buckets.clear()
        self._hidden = None

    def _lengths(self, bucket: int) -> dict[str, int]:
        """Return how long a bucket's arrays are, but for pages, which come last."""
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
        """Return the slots of groups behind the first, each filled up to the bucket."""
        wide = np.full((self._num_groups - 1, slot_stride(bucket)), self._attention.trash_slot)
        of_groups = slots.reshape(self._num_groups - 1, slot_stride(num_tokens))
        wide[:, :num_tokens] = of_groups[:, :num_tokens]
        return wide.ravel()

    def _compute(self, step: Step, ids: DeviceTokens, kind: tuple[int, int]) -> Tensor:
        with self._attention.capturing(*kind):
            hidden = self._network.hidden_states(ids.fill_ids(step), self._attention)
        if self._hidden is None:  # before the first capture, which is of the largest bucket
            self._hidden = torch.empty_like(hidden)
        return self._hidden[: len(hidden)].copy_(hidden)

    def _capture(
        self, step: Step, ids: DeviceTokens, kind: tuple[int, int], launched: Tensor
    ) -> None:
        """Capture a step, and replay it once: its hidden states must be those `launched`.

        Not with other ranks: if one of them captures nothing, the rest would wait for it. Nor with
        recurrent layers, whose rows are behind the step already.
        """
        num_begun = self._network.num_layers_started
        try:
            graph, hidden = self._captures(lambda: self._compute(step, ids, kind))
            if not (self._has_ranks or self._has_rows):
                graph.replay()
                check_replay(hidden[: len(launched)], launched)
            self._captured[kind] = _Captured(graph, hidden)
        except Exception as exc:  # noqa: BLE001 - whatever it was, the step itself is computed
            logger.warning("steps are launched without graphs from now on: %s", exc)
            self.drop()
        self._network.num_layers_started = num_begun


def check_replay(replayed: Tensor, launched: Tensor) -> None:
    """Raise `EngineError` where hidden states `[N, H]` of a replay are others than those before."""
    distance, scale = (replayed.float() - launched.float()).norm(), launched.float().norm()
    if not distance <= REPLAY_TOLERANCE * scale:
        raise EngineError(f"one gave other numbers (off by {distance:.2g} of {scale:.2g})")
