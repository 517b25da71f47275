"""Where the packed tokens of a step lie.

All tokens of a step are packed into one axis: first the decodes (one token a sequence), then the
prefill chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


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
