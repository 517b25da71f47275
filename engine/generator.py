"""What the endpoints need of the engine core, and nothing more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.sequence import SequenceRequest, SequenceResult


class Generator(Protocol):
    """Anything that runs token sequences: the engine core, or a scripted stand-in."""

    async def generate(self, requests: Sequence[SequenceRequest]) -> list[SequenceResult]:
        """Run the sequences of one request together and return their results in the same order.

        Raises `RequestError` when one of them can never run (it needs more KV cache than there
        is): the whole request then fails. Cancelling the call drops the sequences.
        """
