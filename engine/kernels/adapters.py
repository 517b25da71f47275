"""LoRA adapters of linear layers in torch: which rows use which adapter, and its low-rank term."""

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
class AdapterWeights:
    """LoRA weights of one linear layer, A (`down`) and B (`up`): adds (x · downᵀ) · upᵀ."""

    down: Tensor  # [R, I]
    up: Tensor  # [O, R]


class AdapterMapping:
    """Adapter number of each row, 0 being none; updated before each forward pass.

    The linear layers of one network share it.
    """

    def __init__(self) -> None:
        self.has_any = False
        self._of_rows: NDArray[np.int64] = np.zeros(0, np.int64)
        self._rows: list[tuple[int, Tensor]] | None = None
        self._tiles: NDArray[np.int64] | None = None

    def update(self, of_rows: NDArray[np.integer[Any]]) -> None:
        """Set the adapter numbers of the next rows, `[T]`."""
        self.has_any = bool(of_rows.any())
        self._of_rows = of_rows.astype(np.int64)
        self._rows = self._tiles = None

    def tiles(self, at_most: int) -> NDArray[np.int64]:
        """Return runs of up to `at_most` rows of one adapter: begin, end and adapter of each."""
        if self._tiles is None:
            starts = np.flatnonzero(np.diff(self._of_rows, prepend=-1))
            lengths = np.diff(starts, append=len(self._of_rows))
            counts = -(-lengths // at_most)  # pieces of equal length
            run = np.repeat(np.arange(len(starts)), counts)
            number = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
            begins, ends = (
                starts[run] + lengths[run] * cut // counts[run] for cut in (number, number + 1)
            )
            self._tiles = np.stack([begins, ends, self._of_rows[starts][run]], axis=1)
        return self._tiles

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._of_rows)

    def rows(self, device: torch.device) -> Sequence[tuple[int, Tensor]]:
        """Return the adapters in use, each with its rows `[n]`."""
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
class LinearAdapters:
    """All adapters' weights for one linear layer, and the mapping of its rows to them.

    Adapter `i` is `adapters[i - 1]`, None where it does not change this layer.
    """

    adapters: Sequence[AdapterWeights | None]
    mapping: AdapterMapping


def add_adapters(out: Tensor, x: Tensor, adapters: LinearAdapters) -> Tensor:
    """Add the low-rank terms of each row's adapter, of `x [T, I]`, to `out [T, O]` in place."""
    for owner, rows in adapters.mapping.rows(x.device):
        adapter = adapters.adapters[owner - 1]
        if adapter is not None:
            share = functional.linear(functional.linear(x[rows], adapter.down), adapter.up)
            out.index_add_(0, rows, share)
    return out
