"""Token ids on the device, where the next step needs them before the host has them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.sampling import PagedTokenIds
from ..kernels.step import Step
from ..scheduling.table import SequenceTable


class DeviceTokens:
    """Token ids on the device: the last sampled of each slot, and in `paged` those of all pages.

    The step that computes keys and values also writes the ids, so that both exist for the same
    time: sequences that share a page share its ids, also after a preemption.
    """

    def __init__(
        self, num_slots: int, device: torch.device, paged: PagedTokenIds | None = None
    ) -> None:
        self.last = torch.zeros(num_slots, dtype=torch.int32, device=device)  # [slots]
        self.paged = paged

    @classmethod
    def for_table(
        cls, table: SequenceTable, device: torch.device, num_pages: int | None = None
    ) -> DeviceTokens:
        """Return those of a table; with `num_pages` they include pages, one more for padding."""
        paged = None
        if num_pages is not None:
            size = table.page_size
            ids = torch.zeros((num_pages + 1) * size, dtype=torch.int32, device=device)
            paged = PagedTokenIds(ids, table.pages, size)
        return cls(len(table.sequences), device, paged)

    def fill_ids(self, step: Step, *, are_known: bool = False) -> Step:
        """Return the step with the ids that only the device knows; store all ids of the step."""
        if not are_known:
            step = step.with_ids(self.last)
        if self.paged is not None:
            self.paged.ids[step.slots] = step.token_ids
        return step

    def store(self, slots: Tensor, token_ids: Tensor) -> None:
        """Store the ids that slots `[N]` have sampled."""
        self.last[slots] = token_ids.to(self.last.dtype)
