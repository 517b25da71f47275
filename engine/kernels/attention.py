"""What attention is: the shape of a layer, and what serves all layers on one kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.kernels.step import Step


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention: head counts, widths, scaling, and its masks.

    A causal query sees the tokens before it and itself, or up to where its step says that it sees;
    any other its whole sequence. `window` 0: all of these; else those less than so far before it,
    and of what a query sees that is not causal those less than so far behind it. `softcap` 0: none;
    else scores become softcap · tanh(score / softcap). `has_sinks`: a learned logit a head joins
    the softmax without a value.
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


def width_of_token(shapes: Sequence[AttentionShape]) -> int:
    """Return how many numbers a token's keys and values are, over all layers."""
    return sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes)


class HeadNorms(NamedTuple):
    """Weights `[D]` as `norm_weight` gives them, that queries and keys are normed by, each head."""

    query: Tensor
    key: Tensor
    eps: float


class AttentionBackend(Protocol):
    """Keys and values of all layers, in pages of its own layout, and attention over them.

    `prepare` comes once a step, before the first layer; then, layer by layer, `enter`, or `store`
    where heads are normed and turned already, and `attend`.
    """

    page_size: int

    def prepare(self, step: Step) -> None:
        """Take in where the tokens of the coming forward pass lie; valid until the next call."""

    def enter(self, layer: int, qkv: Tensor, turns: Tensor, norms: HeadNorms | None) -> Tensor:
        """Split, norm and turn `qkv [T, (Hq + 2·Hkv)·D]`, store its keys and values → `[T, Hq, D]`.

        `turns [T, 2·R]` fp32 are cosines and sines; of each head number i < R turns with i + R.
        """

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the step's `key [T, Hkv, Dk]` and `value [T, Hkv, Dv]` to their slots."""

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend every token to what it sees of its sequence: `[T, Hq, Dk]` → `[T, Hq, Dv]`.

        The step's own keys and values are stored before. `sinks [Hq]` where the shape has them.
        """


@runtime_checkable
class CapturableBackend(AttentionBackend, Protocol):
    """A backend whose launches a graph may hold, for any step of no more than so many tokens.

    What `prepare` makes of a step lies where it lay before. A captured step may hold tokens of no
    span, which are stored at `trash_slot` and whose rows of `attend` nobody reads.
    """

    trash_slot: int

    def capturing(self, num_tokens: int) -> AbstractContextManager[None]:
        """Let what is launched suffice for any step of so many tokens, not only the prepared."""


class MakesBackend(Protocol):
    """A class of backends: how much a page takes, and one over so many pages.

    `dtype` is what keys and values are kept in: the network's, or `FP8`, in which a number beyond
    its largest becomes that.
    """

    page_size: int

    def __call__(
        self,
        shapes: Sequence[AttentionShape],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> AttentionBackend:
        """Allocate the pages of every layer; they are zero until written."""

    def page_bytes(self, shapes: Sequence[AttentionShape], dtype: torch.dtype) -> int:
        """Return the bytes that one page takes over all layers."""
