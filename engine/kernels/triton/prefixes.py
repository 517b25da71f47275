"""Which decodes of a step begin with the same pages, so that these are read once for all of them.

A page's number stands for it and all before it: where two sequences have the same one at the same
place, the scheduler shared it, and so all before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shared:
    """Runs `starts:stops` of decodes in an order, and the pages `firsts:lasts` that each shares.

    They are in the same places of every one's list. Decode `d` is alone from page `alone_from[d]`.
    """

    order: Ints
    starts: Ints
    stops: Ints
    firsts: Ints
    lasts: Ints
    alone_from: Ints


def shared_by_none(num_decodes: int) -> Shared:
    """Return that nothing is shared."""
    none = np.zeros(0, np.int64)
    return Shared(none, none, none, none, none, np.zeros(num_decodes, np.int64))
