"""Whisper's decoding rules as logit masks, then the likeliest token or a draw.

The rules are those of transformers' logits processors, in their order (`WhisperTimeStampLogits-
Processor` and those that suppress tokens).
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
    """State of a text whose next token is chosen: `written` is without its prompt."""

    written: Sequence[int]
    has_times: bool
    sampling: Sampling
    number: int  # of tokens that were chosen for its recording before


class Chosen(NamedTuple):
    """Tokens `[N]`, their log-probabilities under the rules, and whose logits were no numbers."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    is_broken: NDArray[np.bool_]


class WhisperRules:
    """The rules of one model."""

    def __init__(self, whisper_tokens: WhisperTokens, device: torch.device) -> None:
        self._steering = whisper_tokens
        self._suppressed, self._at_begin = (
            torch.tensor(ids, dtype=torch.int64, device=device)
            for ids in (whisper_tokens.suppressed, whisper_tokens.suppressed_at_begin)
        )

    @torch.inference_mode()
    def choose(self, logits: Tensor, places: Sequence[DecodingState]) -> Chosen:
        """Choose the next token of each row of `logits [N, V]`, which stay as they are."""
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
        """Let times come first, in pairs but for the last one, and never go back."""
        whisper_tokens, first = self._steering, self._steering.first_timestamp
        assert first is not None
        row[first - 1] = NEVER  # that there are none
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
        """Leave only times where all of them together are likelier than any other token."""
        first = self._steering.first_timestamp
        if first is None or not any(has_times):
            return
        times = scores[:, first:].logsumexp(dim=-1)
        are_likelier = times > scores[:, :first].amax(dim=-1)
        are_likelier &= torch.tensor(has_times, device=scores.device)
        for row in are_likelier.nonzero().flatten().tolist():
            scores[row, :first] = NEVER

    def _drawing(self, places: Sequence[DecodingState], vocabulary: int) -> SamplingMetadata:
        """Return how tokens are drawn of scores that went through all other rules."""
        asked = [place.sampling for place in places]
        seeds = np.array([one.seed & (2**64 - 1) for one in asked], np.uint64)
        rules = greedy_metadata(len(places))._replace(
            temperature=_column(one.temperature for one in asked),
            top_k=np.array([one.top_k if one.top_k < vocabulary else 0 for one in asked]),
            top_p=_column(one.top_p for one in asked),
            log_min_p=_column(math.log(one.min_p) if one.min_p else NEVER for one in asked),
            draws=uniform_draws(seeds, np.array([place.number for place in places])),
        )
        has_processors = np.array([_has_penalties(one) for one in asked])
        if not has_processors.any():
            return rules
        # Text alone: times come in pairs, and an end has to come.
        texts = [[t for t in place.written if t < self._steering.end] for place in places]
        tokens = np.zeros((len(texts), max(map(len, texts)) or 1), np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        return rules._replace(
            has_processors=has_processors,
            repetition_penalty=_column(one.repetition_penalty for one in asked),
            presence_penalty=_column(one.presence_penalty for one in asked),
            frequency_penalty=_column(one.frequency_penalty for one in asked),
            tokens=tokens,
            slots=np.arange(len(texts)),
            num_known=np.array([len(text) for text in texts], np.int64),
        )


def _has_penalties(asked: Sampling) -> bool:
    penalties = (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty)
    return penalties != (0.0, 0.0, 1.0)


def _column(values: Iterable[float]) -> NDArray[np.float32]:
    return np.fromiter(values, np.float32)
