"""Low-rank adapters beside products: whose each row is, and what an adapter adds, in torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a product: (x · downᵀ) · upᵀ."""

    down: Tensor  # [R, I]
    up: Tensor  # [O, R]


class Owners:
    """Which adapter each row of products goes through, 0 being none; told before they are made.

    The products of one network share it.
    """

    def __init__(self) -> None:
        self.has_any = False
        self._of_rows: NDArray[np.int64] = np.zeros(0, np.int64)
        self._rows: list[tuple[int, Tensor]] | None = None
        self._tiles: NDArray[np.int64] | None = None

    def tell(self, of_rows: NDArray[np.integer[Any]]) -> None:
        """Take in the owners of the rows `[T]` that come next."""
        self.has_any = bool(of_rows.any())
        self._of_rows = of_rows.astype(np.int64)
        self._rows = self._tiles = None

    def tiles(self, at_most: int) -> NDArray[np.int64]:
        """Return runs of rows of one owner, so many at most: begin, end and owner of each."""
        if self._tiles is None:
            starts = np.flatnonzero(np.diff(self._of_rows, prepend=-1))
            lengths = np.diff(starts, append=len(self._of_rows))
            counts = -(-lengths // at_most)  # in which each run is cut evenly
            run = np.repeat(np.arange(len(starts)), counts)
            number = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
            begins, ends = (
                starts[run] + lengths[run] * cut // counts[run] for cut in (number, number + 1)
            )
            self._tiles = np.stack([begins, ends, self._of_rows[starts][run]], axis=1)
        return self._tiles

    def __len__(self) -> int:
        """Return how many rows come next."""
        return len(self._of_rows)

    def rows(self, device: torch.device) -> Sequence[tuple[int, Tensor]]:
        """Return the adapters that rows go through, each with its rows `[n]`."""
        if not self.has_any:
            return ()
        if self._rows is None:
            self._rows = [
                (int(owner), torch.from_numpy(np.flatnonzero(self._of_rows == owner)).to(device))
                for owner in np.unique(self._of_rows)
                if owner
            ]
        return self._rows


@dataclass(frozen=True, slots=True)
class Adapting:
    """What adapters add to one product, and whose its rows are.

    Adapter `i` is `adapters[i - 1]`, None where it leaves this product as it is.
    """

    adapters: Sequence[LowRank | None]
    owners: Owners


def add_shares(out: Tensor, x: Tensor, adapting: Adapting) -> Tensor:
    """Add to `out [T, O]` what the adapters of its rows make of `x [T, I]`, in place."""
    for owner, rows in adapting.owners.rows(x.device):
        adapter = adapting.adapters[owner - 1]
        if adapter is not None:
            share = functional.linear(functional.linear(x[rows], adapter.down), adapter.up)
            out.index_add_(0, rows, share)
    return out
