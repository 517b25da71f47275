"""Logits of one step: of all its rows at once, or of some rows at a time if prompts are scored."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.step import to_device

# Logits `[M]` of some rows' tokens, in fp32.
ExactLogits = Callable[[NDArray[np.int64], NDArray[np.int64]], Tensor]


class StepLogits:
    """Logits of a step's `N` rows, computed from hidden states on request.

    Without `compute_logits` the states `[N, V]` are the logits. `compute_exact_logits` takes rows
    and token ids, before the next step runs.
    """

    def __init__(
        self,
        states: Tensor,
        compute_logits: Callable[[Tensor], Tensor] | None = None,
        compute_exact_logits: ExactLogits | None = None,
    ) -> None:
        self._states = states  # [N, H] or [N, V]
        self._compute_logits = compute_logits
        self._compute_exact_logits = compute_exact_logits

    @property
    def device(self) -> torch.device:
        """Return the device of the logits."""
        return self._states.device

    @torch.inference_mode()
    def rows(self, rows: NDArray[np.int64]) -> Tensor:
        """Return the logits of some rows, `[M]` in their order → `[M, V]`."""
        is_all = len(rows) == len(self._states)  # no row is requested twice
        states = self._states if is_all else self._states[to_device(rows, self.device)]
        return states if self._compute_logits is None else self._compute_logits(states)

    @torch.inference_mode()
    def exact(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> Tensor | None:
        """Return the logit `[M]` of one token in each of some rows, in fp32; None if unknown.

        Logits of a bf16 model are rounded to 8 bits, which is too coarse to compare a few tokens.
        """
        if self._compute_exact_logits is None or self._states.dtype == torch.float32:
            return None
        return self._compute_exact_logits(rows, token_ids)
