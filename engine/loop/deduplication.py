"""Deduplication: identical deterministic requests in flight are computed once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import fields
from hashlib import blake2b

from ..scheduling.sequence import Sampling, Sequence

_COMPARED = [one.name for one in fields(Sampling) if one.name not in ("logit_bias", "seed")]


class Deduplicator:
    """Sequences that are computed, and duplicates that wait for their results.

    Two requests are duplicates if prompt, parameters, salt and adapter are equal, and also the seed
    if sampling is random. A streamed request always runs alone.
    """

    def __init__(self, *, is_on: bool = True) -> None:
        self._is_on = is_on
        self._first_of: dict[Hashable, Sequence] = {}
        self._key_of: dict[Sequence, Hashable] = {}  # of computed sequences
        self._repeats_of: dict[Sequence, list[Sequence]] = {}

    def __len__(self) -> int:
        """Return the number of waiting duplicates."""
        return sum(map(len, self._repeats_of.values()))

    def join(self, sequence: Sequence) -> bool:
        """Add a new sequence; return whether it waits for another one and must not be computed."""
        key = _key(sequence) if self._is_on else None
        if key is None:
            return False
        first = self._first_of.setdefault(key, sequence)
        if first is sequence:
            self._key_of[sequence] = key
            return False
        self._repeats_of.setdefault(first, []).append(sequence)
        return True

    def settle(self, first: Sequence) -> tuple[list[Sequence], list[Sequence]]:
        """Take a sequence that has ended; return the ones that end with it, and those to compute.

        If it failed, the next duplicate runs: the cause may have been another sequence.
        """
        repeats = self._leave(first)
        if first.error is not None:
            return [], self._start(repeats)
        for sequence in repeats:
            sequence.repeat(first)
        return repeats, []

    def drop(self, unwanted: AbstractSet[object]) -> list[Sequence]:
        """Forget sequences; return those that must now be computed themselves."""
        for first, repeats in list(self._repeats_of.items()):
            self._repeats_of[first] = [one for one in repeats if one not in unwanted]
        left = [first for first in self._key_of if first in unwanted]
        return [started for first in left for started in self._start(self._leave(first))]

    def _leave(self, first: Sequence) -> list[Sequence]:
        key = self._key_of.pop(first, None)
        if key is not None:
            del self._first_of[key]
        return self._repeats_of.pop(first, [])

    def _start(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        return [sequence for sequence in sequences if not self.join(sequence)]


def _key(sequence: Sequence) -> Hashable | None:
    """Return a key that is equal for duplicates; None for a request that runs alone."""
    request, sampling = sequence.request, sequence.request.sampling
    if request.is_streamed:
        return None
    seed = sampling.seed if sampling.temperature else 0
    return (
        blake2b(sequence.prompt.tobytes(), digest_size=16).digest(),
        frozenset(sampling.logit_bias.items()),
        seed,
        *(getattr(sampling, name) for name in _COMPARED),
        request.max_tokens,
        request.min_tokens,
        request.stop_token_ids,
        request.stop_text,
        request.constraint,
        request.repetition,
        request.prompt_logprobs,
        request.logprob_start,
        request.cache_salt,
        request.priority,
        *((image.start, image.digest) for image in request.images),
        request.adapter,
    )
