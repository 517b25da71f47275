"""Steps of a speech model over its slots: each has pages for one window and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.attention import AttentionBackend, AttentionBackendType, AttentionShape
from ...kernels.step import Step
from .architecture import SpeechArchitecture
from .whisper import WhisperModel

Ints = NDArray[np.int64]

# Windows encoded at once: a single one keeps a CPU busy.
WINDOWS_AT_ONCE = 4
# By bytes of a GPU, the largest first.
WINDOWS_OF_GPU = ((60 * 2**30, 32), (0, 16))


def windows_at_once(device: torch.device) -> int:
    """Return how many windows a device encodes at once."""
    if device.type != "cuda":
        return WINDOWS_AT_ONCE
    total = torch.cuda.get_device_properties(device).total_memory
    return next(windows for least, windows in WINDOWS_OF_GPU if total >= least)


@dataclass(frozen=True, slots=True)
class TextStep:
    """Tokens of `S` texts: `counts[s]` of slot `slots[s]`, from position `starts[s]` on.

    All `token_ids` are in one row, text after text; logits of `rows` of them are wanted. All
    earlier tokens of their texts were computed before. An id `-1 - slot` is the slot's last one,
    which only the device knows.
    """

    slots: Ints  # [S]
    starts: Ints  # [S]
    counts: Ints  # [S]
    token_ids: NDArray[np.int32]  # [T]
    rows: Ints  # [N]

    @property
    def num_single(self) -> int:
        """Return the number of texts with one token before the first that has more."""
        counts = self.counts
        return int((counts == 1).argmin()) if (counts != 1).any() else len(counts)


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
    ) -> None:
        self.network = network
        self._backend = backend
        model = network.architecture
        self.pages = slot_pages(model, backend, network.dtype)
        shapes = [model.shape] * model.decoder_layers
        self.texts = self.make_attention(shapes, num_slots * self.pages.of_text)
        self.windows = self.make_attention(shapes, num_slots * self.pages.of_window)
        # The last token of each slot's text, where the next step needs it before the host has it.
        self.last_ids = torch.zeros(num_slots, dtype=torch.int32, device=network.device)
        self.windows_at_once = min(windows_at_once(network.device), num_slots)
        room = self.windows_at_once * self.pages.of_window
        # All layers of the encoder attend on the same pages, one after the other.
        self.encoding = self.make_attention([model.encoder_shape], room)

    def make_attention(self, shapes: Sequence[AttentionShape], num_pages: int) -> AttentionBackend:
        """Return the attention of some layers over new pages."""
        return self._backend(shapes, num_pages, self.network.dtype, self.network.device)

    @torch.inference_mode()
    def encode(self, slots: Sequence[int], features: Tensor) -> Tensor:
        """Encode windows `[W, mels, frames]`, one per slot, and store their keys and values.

        There may be at most `windows_at_once`. Returns their states `[W, S, H]`.
        """
        count, sources = len(slots), self.network.architecture.max_source_positions
        starts, counts = np.zeros(count, np.int64), np.full(count, sources)
        self._prepare(self.encoding, self.window_step(np.arange(count), starts, counts))
        states = self.network.encode(self.on_device(features), self.encoding)
        self._prepare(self.windows, self.window_step(np.array(slots), starts, counts))
        self.network.store_cross_attention(states.flatten(0, 1), self.windows)
        return states

    @torch.inference_mode()
    def decode(self, step: TextStep, queries: dict[int, Tensor] | None = None) -> Tensor:
        """Compute tokens of texts → the logits `[N, V]` of their rows; `queries` as in `decode`."""
        arrays = self.arrays(self.texts, self.pages.of_text, step)
        packed = Step.pack(step.num_single, self.network.device, **arrays).with_ids(self.last_ids)
        self.texts.prepare(packed)
        self._prepare(self.windows, self.looking_step(step))
        return self.network.decode(packed, self.texts, self.windows, queries)

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

    def on_device(self, features: Tensor) -> Tensor:
        """Copy features to the device, asynchronously."""
        device = self.network.device
        if device.type == "cuda":
            features = features.pin_memory()
        return features.to(device, non_blocking=True)

    def free_memory(self) -> None:
        """Release cached device memory, which may be fragmented."""
        if self.network.device.type == "cuda":
            torch.cuda.empty_cache()

    def looking_step(self, step: TextStep) -> TextStep:
        """Return the tokens of texts as ones of their windows.

        Each is the last one of its window, so it sees the whole window.
        """
        slots = np.repeat(step.slots, step.counts)
        last = np.full(len(slots), self.network.architecture.max_source_positions - 1)
        return self.window_step(slots, last, np.ones_like(slots))

    def window_step(self, slots: Ints, starts: Ints, counts: Ints) -> TextStep:
        """Return positions of windows."""
        ids, rows = np.zeros(int(counts.sum()), np.int32), np.zeros(0, np.int64)
        return TextStep(slots, starts, counts, ids, rows)

    def _prepare(self, attention: AttentionBackend, step: TextStep) -> None:
        """Prepare for positions of windows."""
        arrays = self.arrays(attention, self.pages.of_window, step)
        attention.prepare(Step.pack(step.num_single, self.network.device, **arrays))

    def arrays(
        self, attention: AttentionBackend, pages: int, step: TextStep
    ) -> dict[str, NDArray[Any]]:
        """Return the arrays of spans over the pages of their slots; single tokens come first."""
        size, counts, slots = attention.page_size, step.counts, step.slots
        query_starts = np.concatenate([[0], np.cumsum(counts)])
        positions = np.arange(query_starts[-1]) + np.repeat(step.starts - query_starts[:-1], counts)
        return {
            "token_ids": step.token_ids,
            "positions": positions,
            "slots": np.repeat(slots * pages * size, counts) + positions,
            "query_starts": query_starts,
            "context_lengths": step.starts,
            "page_starts": np.arange(len(slots) + 1) * pages,
            "logit_rows": step.rows,
            "pages": (slots[:, None] * pages + np.arange(pages)).ravel(),
        }
