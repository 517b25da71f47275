"""Token costs: seconds of a prefilled and of a decoded token, kept for a model and a machine."""

from __future__ import annotations

import json
from typing import NamedTuple, Self

from ..storage.disk_cache import CacheEntry


class TokenCosts(NamedTuple):
    """Seconds that each prefilled and each decoded token took in a run, and a load."""

    prefill: float
    decode: float
    load: float = 0.0

    def seconds(self, prefilled: float, decoded: float) -> float:
        """Return the seconds of so many tokens."""
        return self.prefill * prefilled + self.decode * decoded

    @classmethod
    def recall(cls, model: str, device: str) -> Self | None:
        """Return what the last long run of a model came to on a device of this name."""
        try:
            return cls(*map(float, json.loads(_entry(model, device).load() or b"null")))
        except (ValueError, TypeError):
            return None

    def save(self, model: str, device: str) -> None:
        """Keep the costs for later runs and estimates on this machine."""
        _entry(model, device).save(json.dumps(self).encode())


def _entry(model: str, device: str) -> CacheEntry:
    return CacheEntry.from_inputs("token-costs", model, device)
