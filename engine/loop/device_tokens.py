"""Ids of tokens on the device, where the next step needs them before the host has them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.sampling import PagedTokenIds
from ..kernels.step import Step
from ..scheduling.table import SequenceTable


class DeviceTokens:
    """Token ids on the device: the last sampled of each slot, and all computed ones where `kept`.

    They are written where their keys and values are, by the step that computes these, and so are
    there for as long: whoever shares a page shares its ids, and whoever is computed again, too.
    """

    def __init__(
        self, num_slots: int, device: torch.device, kept: PagedTokenIds | None = None
    ) -> None:
        self.last = torch.zeros(num_slots, dtype=torch.int32, device=device)  # [slots]
        self.kept = kept

    @classmethod
    def for_table(
        cls, table: SequenceTable, device: torch.device, num_pages: int | None = None
    ) -> DeviceTokens:
        """Return those of a table, and keep `num_pages` pages, one more for nobody's tokens."""
        kept = None
        if num_pages is not None:
            size = table.page_size
            ids = torch.zeros((num_pages + 1) * size, dtype=torch.int32, device=device)
            kept = PagedTokenIds(ids, table.pages, size)
        return cls(len(table.sequences), device, kept)

    def fill_ids(self, step: Step, *, are_known: bool = False) -> Step:
        """Return the step with the ids that only the device knows, after all of it are kept."""
        if not are_known:
            step = step.with_ids(self.last)
        if self.kept is not None:
            self.kept.ids[step.slots] = step.token_ids
        return step

    def store(self, slots: Tensor, token_ids: Tensor) -> None:
        """Note what slots `[N]` have sampled."""
        self.last[slots] = token_ids.to(self.last.dtype)
