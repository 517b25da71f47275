"""Sampling rules of rows, written one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tidemill.engine.kernels.sampling import SamplingMetadata


@dataclass(frozen=True, slots=True)
class Rule:
    """The sampling parameters of one row, and its previous tokens."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    prompt: Sequence[int] = ()
    generated: Sequence[int] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    bans: Sequence[int] = ()
    mask: Sequence[int] | None = None  # the tokens that it allows

    @property
    def has_processors(self) -> bool:
        """Return whether any logit changes."""
        penalties = (self.repetition, self.presence, self.frequency)
        return penalties != (1, 0, 0) or bool(self.bias or self.bans) or self.mask is not None


def joined(metadata: Sequence[Rule], draws: NDArray[np.float64]) -> SamplingMetadata:
    """Return these rows' rules as arrays; their tokens are in slots in another order."""

    def column(name: str) -> NDArray[np.float32]:
        return np.array([getattr(rule, name) for rule in metadata], np.float32)

    def starts(counts: list[int]) -> NDArray[np.int64]:
        return np.cumsum([0, *counts])

    slots = np.arange(len(metadata))[::-1].copy()
    tokens = np.zeros((len(metadata), 1000), np.int32)
    for slot, rule in zip(slots, metadata, strict=True):
        known = [*rule.prompt, *rule.generated]
        tokens[slot, : len(known)] = known
    prompts = np.array([len(rule.prompt) for rule in metadata], np.int64)
    masked = [rule.mask for rule in metadata if rule.mask is not None]
    masks = np.zeros((len(masked), 32), np.uint32)  # of up to 1,024 tokens
    for row, mask in zip(masks, masked, strict=True):
        for token in mask:
            row[token // 32] |= np.uint32(1 << token % 32)
    order = iter(range(len(masked)))
    mask_rows = [-1 if rule.mask is None else next(order) for rule in metadata]
    with np.errstate(divide="ignore"):
        log_min_p = np.log(column("min_p"))
    return SamplingMetadata(
        temperature=column("temperature"),
        top_k=np.array([rule.top_k for rule in metadata], np.int64),
        top_p=column("top_p"),
        log_min_p=log_min_p,
        draws=draws,
        has_processors=np.array([rule.has_processors for rule in metadata], np.bool_),
        repetition_penalty=column("repetition"),
        presence_penalty=column("presence"),
        frequency_penalty=column("frequency"),
        tokens=tokens,
        slots=slots,
        num_prompt=prompts,
        num_known=prompts + [len(rule.generated) for rule in metadata],
        bias_starts=starts([len(rule.bias) for rule in metadata]),
        bias_ids=np.array([token for rule in metadata for token in rule.bias], np.int64),
        bias=np.array([bias for rule in metadata for bias in rule.bias.values()], np.float32),
        ban_starts=starts([len(rule.bans) for rule in metadata]),
        ban_ids=np.array([token for rule in metadata for token in rule.bans], np.int64),
        mask_rows=np.array(mask_rows, np.int64),
        masks=masks,
    )
