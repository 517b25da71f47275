"""Encoder steps on the device: sequences in, their values out, launched without waiting.

On a GPU a step is one copy to the device, one CUDA graph and one copy back. There is no KV cache,
so a graph, which includes pooling, depends on nothing but the step's arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.attention import AttentionBackend, CapturableBackend
from ..kernels.step import StaticArrays
from ..model.encoders.forward import (
    PackedBatch,
    TokenSequence,
    batch_arrays,
    copied,
    decide,
    encoded,
    num_pages,
    run_images,
    wanted_by,
)
from ..model.encoders.loaded_encoder import LoadedEncoder
from ..model.encoders.shared_pages import SharedPages
from .cuda_graphs import Capture, CapturedSteps, buckets
from .runner import Readout

Arrays = dict[str, NDArray[Any]]


class LaunchedEncoding:
    """A launched step, whose values are being copied to the host."""

    def __init__(
        self, values: Tensor, lengths: NDArray[Any] | None = None, *, is_sparse: bool = False
    ) -> None:
        """Start the copy of each sequence's values: a row each, or as many as its length.

        Of rows that are sparse, only the values other than 0 are returned.
        """
        self._lengths = lengths
        self._is_sparse = is_sparse
        self._readout = Readout([values])

    def wait(self) -> Sequence[NDArray[np.float32]] | NDArray[np.float32]:
        """Return the values of each sequence once they have arrived; raise the step's error.

        They are rows `[S, D]` of one array if each sequence has one.
        """
        [values] = self._readout.wait()
        if self._is_sparse:
            return _sparse_rows(values)
        if self._lengths is None:
            return values
        return np.split(values, np.cumsum(self._lengths[:-1]))


def _sparse_rows(values: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Return the values of each row `[V]` that are not 0, `[n, 2]` with their dimensions."""
    flat = np.flatnonzero(values != 0)  # 10 times as fast as without the comparison
    rows, columns = np.divmod(flat, values.shape[1])
    pairs = np.stack([columns.astype(np.float32), values.ravel()[flat]], axis=1)
    return np.split(pairs, np.searchsorted(rows, np.arange(1, len(values))))


class EncoderRunner:
    """Runs steps of one encoder, of up to `max_tokens` or a single longer sequence."""

    def __init__(
        self,
        model: LoadedEncoder,
        max_tokens: int,
        max_sequences: int,
        captures: Capture | None = None,
    ) -> None:
        self._model = model
        most = max(max_tokens, model.max_model_len)
        self._attention = model.attention(num_pages(model, most, max_sequences), max_sequences)
        self._graphs = _make_graphs(model, self._attention, max_tokens, max_sequences, captures)
        self._image_tower = tower = model.image_tower
        if tower is not None:
            most = max(max_tokens, tower.num_tokens)
            self._image_attention = tower.attention(num_pages(tower, most, max_sequences))

    @property
    def num_layers(self) -> int:
        """Return the number of layers launched so far; callable from another thread."""
        tower = self._image_tower
        own = self._model.network.num_layers_started
        return own if tower is None else own + tower.network.num_layers_started

    @torch.inference_mode()
    def launch(self, sequences: Sequence[TokenSequence]) -> LaunchedEncoding:
        """Launch a step; nothing waits for the device."""
        model, graphs = self._model, self._graphs
        if (kind := sequences[0].request.output) == "image":
            assert self._image_tower is not None, "other models get no images"
            return LaunchedEncoding(run_images(self._image_tower, self._image_attention, sequences))
        if kind != "pooled":
            model, graphs = model.giving(kind), None
        arrays = batch_arrays(sequences, wanted_by(model), model)
        if graphs is not None and graphs.can_run(arrays):
            batch = graphs.pack(arrays)
            output = graphs.run(batch)
        else:
            batch = copied(arrays, model.device)
            self._attention.prepare(batch.step)
            output = encoded(model, self._attention, batch)
        if model.decision_network is None:
            if model.pooler.is_sparse:
                return LaunchedEncoding(output, is_sparse=True)
            lengths = np.diff(arrays["row_starts"]) if model.pooler.is_per_token else None
            return LaunchedEncoding(output, lengths)
        token_ids = batch.step.token_ids[: len(output)]
        parts = decide(model, output, token_ids, sequences)
        return LaunchedEncoding(torch.cat(parts), np.array([len(own) for own in parts]))

    def free_memory(self) -> None:
        """Release graphs and cached device memory, which may be fragmented."""
        if self._graphs is not None:
            self._graphs.drop()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()


def _make_graphs(
    model: LoadedEncoder,
    attention: AttentionBackend,
    max_tokens: int,
    max_sequences: int,
    captures: Capture | None,
) -> EncoderGraphs | None:
    """Return the graphs of a model; None if steps cannot be captured."""
    backend = attention.backend if isinstance(attention, SharedPages) else None
    if captures is None or not isinstance(backend, CapturableBackend):
        return None
    sizes = {"max_tokens": max_tokens, "max_sequences": max_sequences}
    return EncoderGraphs(model, attention, backend, captures, **sizes)


class EncoderGraphs:
    """The graphs of one encoder's steps, by their bucket of tokens.

    A bucket has room for a fixed number of sequences. Those that a step lacks have no tokens, and
    their values are unused.
    """

    def __init__(
        self,
        model: LoadedEncoder,
        attention: AttentionBackend,
        backend: CapturableBackend,
        captures: Capture,
        *,
        max_tokens: int,
        max_sequences: int,
    ) -> None:
        self._model, self._attention, self._backend = model, attention, backend
        self._buckets = list(buckets(max_tokens))
        self._max_sequences = max_sequences
        self._wanted = wanted_by(model)
        self._has_types = model.num_types > 1
        # Kinds: the bucket's number of tokens, and the launched kernels.
        self._graphs = CapturedSteps(captures, model.network)
        self._most_pages = num_pages(model, self._buckets[-1], max_sequences)
        self._arrays = StaticArrays(self._lengths(self._buckets[-1]), model.device)
        backend.allocate_workspace(self._buckets[-1], 0)

    def can_run(self, arrays: Arrays) -> bool:
        """Return whether a step with these arrays can run as a graph.

        The encoder's last layer leaves out no tokens if all are wanted.
        """
        return (
            not self._graphs.is_dropped
            and self._least_bucket(arrays) <= self._buckets[-1]
            and not (self._wanted == "all" and arrays["skipped"].any())
            and self._model.network.can_replay(arrays["token_ids"])
        )

    def pack(self, arrays: Arrays) -> PackedBatch:
        """Return the batch of a step, padded to its bucket's sizes; it overwrites the last one.

        The first one has the largest bucket, so that the memory pool has room for later graphs.
        """
        bucket = self._graphs.bucket(self._buckets, self._least_bucket(arrays))
        num_rows = len(arrays["logit_rows"])
        filling = {
            "slots": self._backend.trash_slot,
            "query_starts": len(arrays["token_ids"]),
            "page_starts": len(arrays["pages"]),
            "row_starts": num_rows,
        }
        lengths = self._lengths(bucket)
        like = {"type_ids": "token_ids", "unseen": "context_lengths"}
        zeros = {key: np.zeros_like(arrays[like[key]]) for key in like if key in lengths}
        return PackedBatch.over(*self._arrays.fill(bucket, lengths, zeros | arrays, filling))

    def run(self, batch: PackedBatch) -> Tensor:
        """Return what `encoded` returns for a packed batch; hidden states last until the next."""
        step = batch.step
        self._attention.prepare(step)
        num_tokens, launches = step.num_tokens, self._backend.launches
        if self._graphs.is_full and (num_tokens, launches) not in self._graphs:
            launches = self._backend.all_launches

        def compute() -> Tensor:
            with self._backend.capturing(num_tokens, launches, len(batch.segments.skipped)):
                return encoded(self._model, self._attention, batch)

        is_read = self._model.decision_network is not None
        has_tokens = is_read or self._model.pooler.is_per_token
        count = step.host.token_ids if has_tokens else step.host.context_lengths
        output = self._graphs.run((num_tokens, launches), compute, len(count), launches)
        return output if is_read else output.clone()

    def drop(self) -> None:
        """Release all graphs; no more are captured."""
        self._graphs.drop()

    def _least_bucket(self, arrays: Arrays) -> int:
        """Return the fewest tokens of a bucket for a step.

        It has more tokens than sequences, and one more than the step where padding is pooled.
        """
        is_read = self._wanted == "all" and "cls" in self._model.pooler.modes
        return max(len(arrays["token_ids"]) + is_read, len(arrays["context_lengths"]) + 1)

    def _lengths(self, bucket: int) -> dict[str, int]:
        """Return the lengths of a bucket's arrays; pages, which come last, have room for any."""
        count = min(bucket - 1, self._max_sequences)
        lengths = {
            "token_ids": bucket,
            "positions": bucket,
            "slots": bucket,
            "query_starts": count + 1,
            "context_lengths": count,
            "page_starts": count + 1,
            "logit_rows": bucket if self._wanted == "all" else count,
            "row_starts": count + 1,
            "skipped": count,
        }
        more = {"type_ids": bucket} if self._has_types else {}
        if self._model.pooler.is_per_token:
            more["unseen"] = count
        return {**lengths, **more, "pages": self._most_pages}
