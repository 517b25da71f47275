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
from ..kernels.step import host_buffer
from ..model.speech.architecture import WhisperTokens
from ..scheduling.sequence import Sampling

NEVER = float("-inf")


class DecodingState(NamedTuple):
    """State of a text whose next token is chosen: `num_written` excludes its prompt.

    The device knows its last tokens by its `slot`; penalties need all of them, `written`.
    """

    slot: int
    num_written: int
    has_times: bool
    sampling: Sampling
    number: int  # of tokens chosen for its recording so far
    written: Sequence[int] = ()


class Chosen(NamedTuple):
    """Tokens `[N]`, their log-probabilities under the rules, and whether logits are not finite."""

    token_ids: Tensor
    logprobs: Tensor
    is_broken: Tensor


class WrittenTokens:
    """The end of each slot's text on the device, for rules that depend on its last tokens.

    `last_ids [slots]` is overwritten by each chosen token.
    """

    def __init__(self, last_ids: Tensor, first_timestamp: int | None) -> None:
        self._first = 0 if first_timestamp is None else first_timestamp
        self.last_ids = last_ids
        self.before, self.timestamps = torch.zeros_like(last_ids), torch.zeros_like(last_ids)

    def add(self, slots: Tensor, is_begin: Tensor, token_ids: Tensor) -> None:
        """Append a token to the text of each of `slots [N]`, which is empty where `is_begin`."""
        ids, first = token_ids.to(self.last_ids.dtype), self._first
        # The start of a text counts as a timestamp, and none was before it.
        self.before[slots] = self.last_ids[slots].masked_fill(is_begin, first)
        earlier = self.timestamps[slots].masked_fill(is_begin, first - 1)
        self.timestamps[slots] = torch.where(ids >= first, ids, earlier)
        self.last_ids[slots] = ids


class WhisperRules:
    """The rules of one model."""

    def __init__(self, whisper_tokens: WhisperTokens, device: torch.device) -> None:
        self._whisper_tokens = whisper_tokens
        self._end = whisper_tokens.end
        self._suppressed, self._at_begin = (
            torch.tensor(ids, dtype=torch.int64, device=device)
            for ids in (whisper_tokens.suppressed, whisper_tokens.suppressed_at_begin)
        )

    @torch.inference_mode()
    def choose(
        self, logits: Tensor, places: Sequence[DecodingState], texts: WrittenTokens
    ) -> Chosen:
        """Choose the next token of each row of `logits [N, V]`, and append it to `texts`.

        Nothing waits for the device.
        """
        scores = logits.to(torch.float32, copy=True)
        scores.index_fill_(1, self._suppressed, NEVER)
        slots, is_begin, has_times = _on_device(places, scores.device)
        if any(not place.num_written for place in places):
            some = scores[:, self._at_begin].masked_fill(is_begin[:, None], NEVER)
            scores[:, self._at_begin] = some
        if any(place.has_times for place in places):
            self._apply_times(scores, has_times, is_begin, slots, texts)
        sampling = choose_sampling(scores.dtype, scores.device)
        token_ids, is_broken = sampling.sample(scores, self._drawing(places, scores.shape[1]))
        scored = sampling.compute_logprobs(scores, np.arange(len(scores)), token_ids, 0)
        texts.add(slots, is_begin, token_ids)
        return Chosen(token_ids, scored.logprobs, is_broken)

    def _apply_times(
        self,
        scores: Tensor,
        has_times: Tensor,
        is_begin: Tensor,
        slots: Tensor,
        texts: WrittenTokens,
    ) -> None:
        """Put timestamps first, in pairs except the last one, and never decreasing.

        Only they are allowed if their total probability exceeds that of any other token.
        """
        first, end, vocabulary = self._whisper_tokens.first_timestamp, self._end, scores.shape[1]
        assert first is not None
        last, latest = texts.last_ids[slots], texts.timestamps[slots]
        ends_in_time = (last >= first) & ~is_begin
        is_pair = ends_in_time & (texts.before[slots] >= first)
        lowest = torch.where(ends_in_time, last, latest + 1)
        lowest = lowest.masked_fill(is_begin, first).masked_fill(is_pair, vocabulary)
        lowest = lowest.masked_fill(~has_times, 0)
        ids = torch.arange(first, vocabulary, device=scores.device)
        is_refused = ids < lowest[:, None]
        if self._whisper_tokens.max_initial_timestamp is not None:
            is_late = ids > first + self._whisper_tokens.max_initial_timestamp
            is_refused |= is_late & (is_begin & has_times)[:, None]
        times, texts_only, others = scores[:, first:], scores[:, :end], scores[:, end:first]
        times.masked_fill_(is_refused, NEVER)
        others[:, -1].masked_fill_(has_times, NEVER)  # the no-timestamps token
        needs_time = has_times & is_begin
        lacks_text = needs_time | (has_times & ends_in_time & ~is_pair)
        best = torch.maximum(
            texts_only.amax(dim=-1).masked_fill(lacks_text, NEVER),
            others.amax(dim=-1).masked_fill(needs_time, NEVER),
        )
        needs_time |= has_times & (times.logsumexp(dim=-1) > best)
        texts_only.masked_fill_((lacks_text | needs_time)[:, None], NEVER)
        others.masked_fill_(needs_time[:, None], NEVER)

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
        has_processors = np.array([has_penalties(one) for one in sampling])
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


def has_penalties(sampling: Sampling) -> bool:
    """Return whether a text's next token depends on all earlier ones."""
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    return penalties != (0.0, 0.0, 1.0)


def _on_device(places: Sequence[DecodingState], device: torch.device) -> tuple[Tensor, ...]:
    """Return slots, which texts are empty and which have timestamps, `[N]` each, in one copy."""
    count = len(places)
    host = host_buffer(3 * count, device)
    host.numpy()[:] = [
        *(place.slot for place in places),
        *(not place.num_written for place in places),
        *(place.has_times for place in places),
    ]
    slots, is_begin, has_times = host.to(device, non_blocking=True).view(3, count)
    return slots, is_begin.bool(), has_times.bool()


def _column(values: Iterable[float]) -> NDArray[np.float32]:
    return np.fromiter(values, np.float32)
