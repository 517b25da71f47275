"""Paged attention: a layer's shape, and the backend that owns the KV cache of all layers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .step import Step

# Bits of one backend's numbers of programs; all bits are any numbers.
PROGRAM_BITS = 18
ANY_PROGRAMS = -1


@dataclass(frozen=True, slots=True, eq=False)
class PositionBias:
    """Learned relative position bias: a logit per head for each distance of a key from its query.

    `logits [Hq, 2·R + 1]` fp32 begin with the key R places before the query; no sequence is longer
    than R + 1. Layers that share a bias share this object.
    """

    logits: Tensor

    @property
    def reach(self) -> int:
        """Return R, the largest distance."""
        return self.logits.shape[1] // 2

    def between(self, tokens: int, length: int) -> Tensor:
        """Return the logits `[Hq, tokens, length]` of the last `tokens` of a sequence."""
        device = self.logits.device
        queries = torch.arange(length - tokens, length, device=device)[:, None]
        return self.logits[:, torch.arange(length, device=device) - queries + self.reach]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention of one layer: head counts, widths, scaling and masks.

    A causal query sees itself and the tokens before it, or up to the step's `ends` if the layer
    `sees_ahead`; a bidirectional query sees its whole sequence, without the step's `unseen` tokens.
    `window` (sliding window) 0
    means no limit; otherwise only tokens less than `window` before it, and for a bidirectional
    query less than `window` after it. `chunk` (chunked attention) 0 means none; otherwise only
    tokens from the last multiple of `chunk` on.
    `softcap` 0 means none; else scores become softcap · tanh(score / softcap). With `has_sinks`
    (attention sinks), a learned logit per head joins the softmax without a value. `position_bias`
    is added to scores after the softcap. With `has_latent_values` (MLA), values are the first
    `value_dim` numbers of the one key head, and stored with it. With `num_selected` (sparse
    attention) at most that many tokens are seen, which index keys of `index_dim` select; with 0
    they are those of an earlier layer.
    """

    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scaling: float
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    is_causal: bool = True
    sees_ahead: bool = True
    chunk: int = 0
    has_latent_values: bool = False
    position_bias: PositionBias | None = None
    num_selected: int = 0
    index_dim: int = 0

    @property
    def most_visible(self) -> int:
        """Return the most tokens that a causal query sees, including itself; 0: any number."""
        return min(filter(None, (self.window, self.chunk)), default=0)

    def first_visible(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first positions that queries at some positions see."""
        firsts = np.maximum(places - self.window + 1, 0) if self.window else np.zeros_like(places)
        if self.chunk:
            firsts = np.maximum(firsts, places // self.chunk * self.chunk)
        return firsts


def kv_width(shapes: Sequence[AttentionShape]) -> int:
    """Return the number of elements that pages store per token over all layers.

    These are keys and values, or only keys if values are part of them (latents).
    """
    return sum(
        shape.num_kv_heads * (shape.key_dim + shape.value_dim * (not shape.has_latent_values))
        for shape in shapes
    )


class HeadNorms(NamedTuple):
    """QK norm: weights `[D]`, as `norm_weight` gives them, of each query and key head's RMSNorm."""

    query: Tensor
    key: Tensor
    eps: float


class AttentionBackend(Protocol):
    """Paged KV cache of all layers, in its own layout, and attention over it.

    `prepare` is called once per step, before the first layer. Then each layer calls `store_qkv`, or
    `store` if heads are normed and rotated already, and `attend`. Only a backend that
    `copies_slots` gets steps with copies.
    """

    page_size: int
    copies_slots: bool

    def prepare(self, step: Step) -> None:
        """Prepare for the next forward pass, that of `step`; valid until the next call."""

    def store_qkv(
        self, layer: int, qkv: Tensor, cos_sin: Tensor, norms: HeadNorms | None
    ) -> Tensor:
        """Split `qkv [T, (Hq + 2·Hkv)·D]`, norm and rotate heads, store KV → query `[T, Hq, D]`.

        `cos_sin [T, 2·R]` fp32 are the rotary cosines and sines; in each head number i < R is
        rotated with number i + R.
        """

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the step's `key [T, Hkv, Dk]` and `value [T, Hkv, Dv]` to their slots."""

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Compute attention of every token to its visible context: `[T, Hq, Dk]` → `[T, Hq, Dv]`.

        The step's own keys and values are stored before. `sinks [Hq]` are given if the shape has
        any.
        """


class PagedBackend(AttentionBackend, Protocol):
    """A backend whose pages other layers may use as well."""

    def with_layers(self, shapes: Sequence[AttentionShape]) -> PagedBackend:
        """Return a backend of other layers, at most as many, over the same pages.

        Their keys and values have the same widths; a page contains what either stored last.
        """


@runtime_checkable
class CapturableBackend(AttentionBackend, Protocol):
    """A backend whose launches a CUDA graph can replay for any step of up to `num_tokens` tokens.

    Once there is a workspace, `prepare` writes to static addresses. A captured step may be padded
    with tokens of no span, which are stored at `trash_slot` and whose rows of `attend` are unused.
    `launches`, bits, are the kernels that the prepared step needs and not every step does;
    `all_launches` those that any step may need. `programs` are the prepared step's numbers of
    programs, rounded up. Steps on all ranks need the same ones.
    """

    trash_slot: int
    launches: int
    all_launches: int
    programs: int

    def allocate_workspace(self, num_tokens: int, num_decodes: int) -> None:
        """Allocate, once, the buffers of captured steps up to these numbers of tokens and decodes.

        They also serve launched steps of that many decodes, whatever their tokens.
        """

    def capturing(
        self,
        num_tokens: int,
        launches: int,
        num_spans: int | None = None,
        programs: int = ANY_PROGRAMS,
    ) -> AbstractContextManager[None]:
        """Launch enough programs for any step with these `launches`, not only the prepared one.

        It has at most `num_spans`, or any number for None, and at most these `programs`.
        """


class AttentionBackendType(Protocol):
    """A class of attention backends: the size of a page, and the constructor.

    `dtype` is the KV cache dtype: the network's, or `FP8`, where larger numbers saturate.
    """

    page_size: int

    def __call__(
        self,
        shapes: Sequence[AttentionShape],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PagedBackend:
        """Allocate the pages of every layer; they are zero until written."""

    def page_bytes(self, shapes: Sequence[AttentionShape], dtype: torch.dtype) -> int:
        """Return the bytes that one page takes over all layers."""
