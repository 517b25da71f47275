"""Ids of tokens on the device, where the next step needs them before the host has them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.sampling import KeptIds
from engine.kernels.step import Step
from engine.scheduling.table import SequenceTable


class DeviceIds:
    """What each slot sampled last; and all tokens that are computed, where they are `kept`.

    They are written where their keys and values are, by the step that computes these, and so are
    there for as long: whoever shares a page shares its ids, and whoever is computed again, too.
    """

    def __init__(self, num_slots: int, device: torch.device, kept: KeptIds | None = None) -> None:
        self.last = torch.zeros(num_slots, dtype=torch.int32, device=device)  # [slots]
        self.kept = kept

    @classmethod
    def of(
        cls, table: SequenceTable, device: torch.device, num_pages: int | None = None
    ) -> DeviceIds:
        """Return those of a table, and keep `num_pages` pages, one more for nobody's tokens."""
        kept = None
        if num_pages is not None:
            size = table.page_size
            ids = torch.zeros((num_pages + 1) * size, dtype=torch.int32, device=device)
            kept = KeptIds(ids, table.pages, size)
        return cls(len(table.sequences), device, kept)

    def tell(self, step: Step, *, are_known: bool = False) -> Step:
        """Return the step with the ids that only the device knows, after all of it are kept."""
        if not are_known:
            step = step.with_ids(self.last)
        if self.kept is not None:
            self.kept.ids[step.slots] = step.token_ids
        return step

    def remember(self, slots: Tensor, token_ids: Tensor) -> None:
        """Note what slots `[N]` have sampled."""
        self.last[slots] = token_ids.to(self.last.dtype)
