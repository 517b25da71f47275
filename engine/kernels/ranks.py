"""Ranks that compute one model together: what each has of it, and what they tell each other."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Share(NamedTuple):
    """What rank `rank` of `size` has: runs of neighbours, as long as each other's but the last."""

    rank: int = 0
    size: int = 1

    def of(self, count: int) -> range:
        """Return which of so many things are this rank's."""
        each = -(-count // self.size)
        return range(*(min(rank * each, count) for rank in (self.rank, self.rank + 1)))

    def of_key_heads(self, count: int) -> range:
        """Return which key heads its queries read: one of others, too, if there are too few."""
        if count >= self.size:
            return self.of(count)
        head = self.rank * count // self.size
        return range(head, head + 1)


class Group(Protocol):
    """The ranks of one model; each calls the same functions in the same order."""

    share: Share

    def add(self, x: Tensor) -> Tensor:
        """Add up what ranks have, in place of each one's, and return it: the same for all."""

    def join(self, x: Tensor, width: int) -> Tensor:
        """Lay columns of all ranks side by side, on the first: `x [N, O]` → `[N, width]`.

        Those behind `width` are left out. Others have something that nobody needs.
        """

    def spread(self, x: Tensor) -> Tensor:
        """Give all what the first has, in place of theirs, and return it."""


class Alone:
    """A group of one."""

    share = Share()

    def add(self, x: Tensor) -> Tensor:
        """Leave it as it is."""
        return x

    def join(self, x: Tensor, width: int) -> Tensor:
        """Leave it as it is."""
        assert x.shape[-1] == width
        return x

    def spread(self, x: Tensor) -> Tensor:
        """Leave it as it is."""
        return x


ALONE = Alone()
