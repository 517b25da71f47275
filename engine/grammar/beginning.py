"""What stands before a constrained output: anything, up to a text that ends it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.grammar.bits import bar
from engine.grammar.vocabulary import KnownTokens


@dataclass(frozen=True, slots=True)
class Beginning:
    """Tokens that may come up to `text`, with which, and white space behind it, the last one ends.

    `open [words]` are those that may come where nothing of it has come yet; `crossing[k]` those
    that would go on with something else where its first `k` bytes have.
    """

    text: bytes
    open: NDArray[np.uint32] = field(compare=False)
    crossing: tuple[NDArray[np.int64], ...] = field(compare=False)

    def fill(self, tail: bytes, mask: NDArray[np.uint32]) -> None:
        """Write which tokens may come behind text that ends with `tail`."""
        mask[:] = self.open
        for begun in range(1, len(self.text)):
            if tail.endswith(self.text[:begun]):
                bar(mask, self.crossing[begun])


def beginning(text: str, tokens: KnownTokens, vocab_size: int) -> Beginning:
    """Return what may come up to a text, where no token that ends a sequence may."""
    wanted = text.encode()
    crossing = [
        [i for i, piece in enumerate(tokens.pieces) if _crosses(piece, wanted[begun:], begun)]
        for begun in range(len(wanted))
    ]
    barred = [np.array(ids, np.int64) for ids in crossing]
    open_mask = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
    bar(open_mask, np.array(tokens.ends, np.int64))
    bar(open_mask, barred[0])
    return Beginning(wanted, open_mask, tuple(barred))


def _crosses(piece: bytes, rest: bytes, begun: int) -> bool:
    """Say whether a token goes on behind the rest of a text, of which so much has come."""
    if begun:
        return piece.startswith(rest) and bool(piece[len(rest) :].strip())
    return rest in piece and bool(piece.split(rest, 1)[1].strip())
