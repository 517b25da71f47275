"""Communicator of tensor-parallel ranks: each rank's shard of a model, and their collectives."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Shard(NamedTuple):
    """The shard of rank `rank` of `size`: contiguous and of equal length, except for the last."""

    rank: int = 0
    size: int = 1

    def indices(self, count: int) -> range:
        """Return this rank's indices of `count` heads, columns or rows."""
        each = -(-count // self.size)
        return range(*(min(rank * each, count) for rank in (self.rank, self.rank + 1)))

    def kv_head_indices(self, count: int) -> range:
        """Return the key heads that its queries read; ranks replicate them if there are too few."""
        if count >= self.size:
            return self.indices(count)
        head = self.rank * count // self.size
        return range(head, head + 1)


class Communicator(Protocol):
    """Collectives among the ranks of one model; each rank calls the same ones in the same order."""

    shard: Shard

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over all ranks, in place, and return it: the same on all."""

    def gather(self, x: Tensor, width: int) -> Tensor:
        """Concatenate the columns of all ranks on the first: `x [N, O]` → `[N, width]`.

        Columns after `width` are padding and left out. The result of other ranks is meaningless.
        """

    def broadcast(self, x: Tensor) -> Tensor:
        """Copy the first rank's `x` to all ranks, in place, and return it."""


class SingleRank:
    """Communicator of a single rank: no collective is launched."""

    shard = Shard()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return `x` as it is."""
        return x

    def gather(self, x: Tensor, width: int) -> Tensor:
        """Return `x` as it is."""
        assert x.shape[-1] == width
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Return `x` as it is."""
        return x


SINGLE_RANK = SingleRank()
