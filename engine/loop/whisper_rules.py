"""Whisper's decoding rules as logit masks, then the most likely token or a sample.

The rules are those of transformers' logits processors, in the same order
(`WhisperTimeStampLogitsProcessor` and those that suppress tokens).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.backends import choose_sampling
from ..kernels.sampling import SamplingMetadata, greedy_metadata, uniform_draws
from ..model.speech.architecture import WhisperTokens
from ..scheduling.sequence import Sampling

NEVER = float("-inf")


class DecodingState(NamedTuple):
    """State of a text whose next token is chosen: `written` excludes its prompt."""

    written: Sequence[int]
    has_times: bool
    sampling: Sampling
    number: int  # of tokens chosen for its recording so far


class Chosen(NamedTuple):
    """Tokens `[N]`, their log-probabilities under the rules, and whether logits are not finite."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    is_broken: NDArray[np.bool_]


class WhisperRules:
    """The rules of one model."""

    def __init__(self, whisper_tokens: WhisperTokens, device: torch.device) -> None:
        self._whisper_tokens = whisper_tokens
        self._suppressed, self._at_begin = (
            torch.tensor(ids, dtype=torch.int64, device=device)
            for ids in (whisper_tokens.suppressed, whisper_tokens.suppressed_at_begin)
        )

    @torch.inference_mode()
    def choose(self, logits: Tensor, places: Sequence[DecodingState]) -> Chosen:
        """Choose the next token of each row of `logits [N, V]`, which do not change."""
        scores = logits.to(torch.float32, copy=True)
        scores.index_fill_(1, self._suppressed, NEVER)
        for row, place in zip(scores, places, strict=True):
            if not place.written:
                row[self._at_begin] = NEVER
            if place.has_times:
                self._keep_times(row, place.written)
        self._prefer_times(scores, [place.has_times for place in places])
        sampling = choose_sampling(scores.dtype, scores.device)
        token_ids, is_broken = sampling.sample(scores, self._drawing(places, scores.shape[1]))
        scored = sampling.compute_logprobs(scores, np.arange(len(scores)), token_ids, 0)
        return Chosen(*(one.cpu().numpy() for one in (token_ids, scored.logprobs, is_broken)))

    def _keep_times(self, row: Tensor, written: Sequence[int]) -> None:
        """Put timestamps first, in pairs except the last one, and never decreasing."""
        whisper_tokens, first = self._whisper_tokens, self._whisper_tokens.first_timestamp
        assert first is not None
        row[first - 1] = NEVER  # the no-timestamps token
        if not written:
            row[:first] = NEVER
            if whisper_tokens.max_initial_timestamp is not None:
                row[first + whisper_tokens.max_initial_timestamp + 1 :] = NEVER
            return
        last_is_time = written[-1] >= first
        one_before_is_time = len(written) < 2 or written[-2] >= first
        if last_is_time and one_before_is_time:
            row[first:] = NEVER
            return
        if last_is_time:
            row[: whisper_tokens.end] = NEVER
            row[first : written[-1]] = NEVER
            return
        last = next((token for token in reversed(written) if token >= first), first - 1)
        row[first : last + 1] = NEVER

    def _prefer_times(self, scores: Tensor, has_times: list[bool]) -> None:
        """Allow only timestamps if their total probability exceeds that of any other token."""
        first = self._whisper_tokens.first_timestamp
        if first is None or not any(has_times):
            return
        times = scores[:, first:].logsumexp(dim=-1)
        are_likelier = times > scores[:, :first].amax(dim=-1)
        are_likelier &= torch.tensor(has_times, device=scores.device)
        for row in are_likelier.nonzero().flatten().tolist():
            scores[row, :first] = NEVER

    def _drawing(self, places: Sequence[DecodingState], vocabulary: int) -> SamplingMetadata:
        """Return the sampling parameters for scores after all other rules."""
        sampling = [place.sampling for place in places]
        seeds = np.array([one.seed & (2**64 - 1) for one in sampling], np.uint64)
        rules = greedy_metadata(len(places))._replace(
            temperature=_column(one.temperature for one in sampling),
            top_k=np.array([one.top_k if one.top_k < vocabulary else 0 for one in sampling]),
            top_p=_column(one.top_p for one in sampling),
            log_min_p=_column(math.log(one.min_p) if one.min_p else NEVER for one in sampling),
            draws=uniform_draws(seeds, np.array([place.number for place in places])),
        )
        has_processors = np.array([_has_penalties(one) for one in sampling])
        if not has_processors.any():
            return rules
        # Penalties apply only to text: timestamps come in pairs, and the end must stay possible.
        texts = [[t for t in place.written if t < self._whisper_tokens.end] for place in places]
        tokens = np.zeros((len(texts), max(map(len, texts)) or 1), np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        return rules._replace(
            has_processors=has_processors,
            repetition_penalty=_column(one.repetition_penalty for one in sampling),
            presence_penalty=_column(one.presence_penalty for one in sampling),
            frequency_penalty=_column(one.frequency_penalty for one in sampling),
            tokens=tokens,
            slots=np.arange(len(texts)),
            num_known=np.array([len(text) for text in texts], np.int64),
        )


def _has_penalties(sampling: Sampling) -> bool:
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    return penalties != (0.0, 0.0, 1.0)


def _column(values: Iterable[float]) -> NDArray[np.float32]:
    return np.fromiter(values, np.float32)
