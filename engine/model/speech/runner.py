"""Steps of a speech model over its slots: each has pages for one window and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.attention import AttentionBackend, AttentionBackendType
from ...kernels.step import Step
from .architecture import SpeechArchitecture
from .whisper import WhisperModel

Ints = NDArray[np.int64]

# Windows encoded at once; a single one keeps a CPU busy.
WINDOWS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class TextStep:
    """Tokens of `S` texts: `counts[s]` of slot `slots[s]`, from position `starts[s]` on.

    All `token_ids` are in one row, text after text; logits of `rows` of them are wanted. All
    earlier tokens of their texts were computed before.
    """

    slots: Ints  # [S]
    starts: Ints  # [S]
    counts: Ints  # [S]
    token_ids: NDArray[np.int32]  # [T]
    rows: Ints  # [N]


@dataclass(frozen=True, slots=True)
class SlotPages:
    """Pages of a slot for cross-attention and self-attention, and their bytes."""

    of_window: int
    of_text: int
    num_bytes: int


def slot_pages(
    model: SpeechArchitecture, backend: AttentionBackendType, dtype: torch.dtype
) -> SlotPages:
    """Return the memory of a slot: a window and a text have keys and values in the same layers."""
    window, text = (
        -(-count // backend.page_size)
        for count in (model.max_source_positions, model.max_target_positions)
    )
    page = backend.page_bytes([model.shape] * model.decoder_layers, dtype)
    return SlotPages(window, text, (window + text) * page)


class SpeechRunner:
    """Runs one model for up to `num_slots` windows at a time."""

    def __init__(
        self,
        network: WhisperModel,
        backend: AttentionBackendType,
        num_slots: int,
        windows_at_once: int = WINDOWS_AT_ONCE,
    ) -> None:
        self.network = network
        model, dtype = network.architecture, network.dtype
        self._pages = slot_pages(model, backend, dtype)
        shapes = [model.shape] * model.decoder_layers

        def attention(pages: int) -> AttentionBackend:
            return backend(shapes, num_slots * pages, dtype, network.device)

        self._texts = attention(self._pages.of_text)
        self._windows = attention(self._pages.of_window)
        # All layers of the encoder attend on the same pages, one after the other.
        self.windows_at_once = min(windows_at_once, num_slots)
        room = self.windows_at_once * self._pages.of_window
        self._encoding = backend([model.encoder_shape], room, dtype, network.device)

    @torch.inference_mode()
    def encode(self, slots: Sequence[int], features: Tensor) -> Tensor:
        """Encode windows `[W, mels, frames]`, one per slot, and store their keys and values.

        There may be at most `windows_at_once`. Returns their states `[W, S, H]`.
        """
        count, sources = len(slots), self.network.architecture.max_source_positions
        starts, counts = np.zeros(count, np.int64), np.full(count, sources)
        self._prepare(self._encoding, np.arange(count), starts, counts)
        states = self.network.encode(features.to(self.network.device), self._encoding)
        self._prepare(self._windows, np.array(slots), starts, counts)
        self.network.store_cross_attention(states.flatten(0, 1), self._windows)
        return states

    @torch.inference_mode()
    def decode(self, step: TextStep, queries: dict[int, Tensor] | None = None) -> Tensor:
        """Compute tokens of texts → the logits `[N, V]` of their rows; `queries` as in `decode`."""
        packed = self._packed(self._texts, self._pages.of_text, step)
        self._texts.prepare(packed)
        # Each token is the last one of its window, so it sees the whole window.
        slots = np.repeat(step.slots, step.counts)
        last = np.full(len(slots), self.network.architecture.max_source_positions - 1)
        self._prepare(self._windows, slots, last, np.ones_like(slots))
        return self.network.decode(packed, self._texts, self._windows, queries)

    @torch.inference_mode()
    def cross_attentions(
        self,
        slot: int,
        token_ids: Sequence[int],
        states: Tensor,
        heads: tuple[tuple[int, int], ...],
    ) -> Tensor:
        """Return the attention of (layer, head) pairs for each token of a text: `[A, T, S]`.

        The text is a slot's whole text; `states [S, H]` are its window's.
        """
        queries = dict.fromkeys((layer for layer, _ in heads), states)
        zero, count = np.zeros(1, np.int64), np.array([len(token_ids)])
        ids = np.array(token_ids, np.int32)
        self.decode(TextStep(np.array([slot]), zero, count, ids, count - 1), queries)
        return self.network.cross_attentions(queries, states, heads)

    def _prepare(
        self, attention: AttentionBackend, slots: Ints, starts: Ints, counts: Ints
    ) -> None:
        """Prepare for positions of windows."""
        ids, rows = np.zeros(int(counts.sum()), np.int32), np.zeros(0, np.int64)
        step = TextStep(slots, starts, counts, ids, rows)
        attention.prepare(self._packed(attention, self._pages.of_window, step))

    def _packed(self, attention: AttentionBackend, pages: int, step: TextStep) -> Step:
        """Return a step of spans over the pages of their slots; single tokens come first."""
        size, counts, slots = attention.page_size, step.counts, step.slots
        query_starts = np.concatenate([[0], np.cumsum(counts)])
        positions = np.arange(query_starts[-1]) + np.repeat(step.starts - query_starts[:-1], counts)
        return Step.pack(
            int((counts == 1).argmin()) if (counts != 1).any() else len(counts),
            self.network.device,
            token_ids=step.token_ids,
            positions=positions,
            slots=np.repeat(slots * pages * size, counts) + positions,
            query_starts=query_starts,
            context_lengths=step.starts,
            page_starts=np.arange(len(slots) + 1) * pages,
            pages=(slots[:, None] * pages + np.arange(pages)).ravel(),
            logit_rows=step.rows,
        )
