"""What attention is given in a step: a layer's shape, and where the packed tokens lie.

All tokens of a step are packed into one axis: first the decodes (one token a sequence), then the
prefill chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention: head counts, widths, scaling, and its masks.

    `window` 0: full; else a query at position p sees keys at positions > p - window. `softcap` 0:
    none; else scores become softcap · tanh(score / softcap). `has_sinks`: a learned logit a head
    joins the softmax without a value.
    """

    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scaling: float
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False


class Chunk(NamedTuple):
    """A prefill chunk: packed tokens `start:stop` follow `context` tokens that lie in `pages`.

    `pages [n]` cover the context and the chunk itself, whose keys and values are stored first.
    """

    start: int
    stop: int
    context: int
    pages: Tensor


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Where the tokens of one step lie: `T` packed tokens, the first `num_decodes` of them decodes.

    `token_pages`, `token_offsets` `[T]` int64: the cache slot of each token. `decode_pages
    [N, max]` int32: the pages of each decoding sequence; `decode_lengths [N]` int32: its tokens,
    this one included.
    """

    num_decodes: int
    token_pages: Tensor
    token_offsets: Tensor
    decode_pages: Tensor
    decode_lengths: Tensor
    chunks: tuple[Chunk, ...]
