"""Attention parity: check a backend's kernels against plain attention before they serve.

The few tokens of a parity check reach neither split contexts (split-KV), nor prefixes shared by
sequences, nor a chunk behind a long context. So each layer's spec attends to random numbers here,
in steps that have all of these. The result must match within the rounding error of its dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ModelRefused
from ..kernels.attention import AttentionBackend, AttentionBackendType, AttentionShape
from ..kernels.paged_step import Span, paged_step
from ..kernels.reference import attend
from ..kernels.step import Step
from .network.loaded_model import LoadedModel
from .parity_cache import device_fact

# In pages: long enough to be split, and to be shared by separate tiles.
LONGEST_PAGES, SHARED_PAGES = 44, 6
# A row's relative L2 distance, in units of its dtype: rounding scores and sums makes half of one.
TOLERANCE_UNITS = 2
# Error of the exponentials, where the dtype would allow less.
LEAST_TOLERANCE = 1e-4


class _Span(NamedTuple):
    """Tokens `start:stop` of a sequence."""

    sequence: int
    start: int
    stop: int


def check_attention_parity(name: str, loaded: LoadedModel) -> None:
    """Refuse a model whose attention backend disagrees with the reference."""
    dtype, kept = loaded.dtype, loaded.cache_dtype or loaded.dtype
    tolerance = max(TOLERANCE_UNITS * torch.finfo(dtype).eps, LEAST_TOLERANCE)
    for shape in dict.fromkeys(loaded.shapes):
        causes = (repr(loaded.backend), repr(shape), str(dtype), str(kept))
        fact = device_fact("attention", loaded.device, *causes)
        if fact.load() is not None:
            continue
        distance = attention_distance(loaded.backend, shape, dtype, kept, loaded.device)  # type: ignore[arg-type] # a class, which is hashable
        if not distance <= tolerance:
            raise ModelRefused(
                f"{name}: attention is computed wrongly on this machine (relative distance "
                f"{distance:.2g}, at most {tolerance:.2g}, for {shape}): its kernels do not work "
                "on this device or driver. Please report it; --device cpu runs without a GPU."
            )
        fact.save(b"")


@cache
@torch.inference_mode()
def attention_distance(
    backend: AttentionBackendType,
    shape: AttentionShape,
    dtype: torch.dtype,
    kept: torch.dtype,
    device: torch.device,
) -> float:
    """Return the largest relative L2 distance of a token's attention from plain fp32 attention.

    Keys and values are rounded to the `kept` dtype first.
    """
    sequences = _Sequences.random(shape, dtype, kept, device, backend.page_size)
    attention = backend([shape], sequences.num_pages, kept, device)
    distances = [sequences.distance(attention, spans) for spans in sequences.steps()]
    return float(torch.cat(distances).nan_to_num(torch.inf).max())


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Sequences of one layer that share their first pages; pages are in random order."""

    shape: AttentionShape
    page_size: int
    pages: NDArray[np.int64]  # [sequences, LONGEST_PAGES]
    queries: Tensor  # [sequences, tokens, Hq, Dk]
    keys: Tensor  # [sequences, tokens, Hkv, Dk]
    values: Tensor  # [sequences, tokens, Hkv, Dv]
    sinks: Tensor | None  # [Hq]

    @classmethod
    def random(
        cls,
        shape: AttentionShape,
        dtype: torch.dtype,
        kept: torch.dtype,
        device: torch.device,
        page_size: int,
    ) -> _Sequences:
        count, tokens = 4, LONGEST_PAGES * page_size
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device).to(dtype)

        keys = normal(count, tokens, shape.num_kv_heads, shape.key_dim).to(kept).to(dtype)
        values = normal(count, tokens, shape.num_kv_heads, shape.value_dim).to(kept).to(dtype)
        if shape.has_latent_values:
            values = keys[..., : shape.value_dim].clone()
        shared = SHARED_PAGES * page_size
        keys[1:, :shared], values[1:, :shared] = keys[0, :shared], values[0, :shared]
        pages = np.random.default_rng(0).permutation(count * LONGEST_PAGES).reshape(count, -1)
        pages[1:, :SHARED_PAGES] = pages[0, :SHARED_PAGES]
        queries = normal(count, tokens, shape.num_query_heads, shape.key_dim)
        sinks = normal(shape.num_query_heads) if shape.has_sinks else None
        return cls(shape, page_size, pages, queries, keys, values, sinks)

    @property
    def num_pages(self) -> int:
        return self.pages.size

    def steps(self) -> list[list[_Span]]:
        """Return steps of prefills after cached prefixes, then one of decodes with a chunk."""
        size, longest = self.page_size, self.pages.shape[1] * self.page_size
        shared, half = SHARED_PAGES * size, longest // 2 + 1
        return [
            [_Span(0, 0, half), _Span(1, shared, shared + size - 1)],
            [_Span(3, shared, shared + 1), _Span(0, half, longest - 1), _Span(2, shared, half)],
            [
                *(_Span(0, longest - 1, longest), _Span(1, shared + size - 1, shared + size)),
                *(_Span(2, half, half + 1), _Span(3, shared + 1, half)),
            ],
        ]

    def distance(self, attention: AttentionBackend, spans: Sequence[_Span]) -> Tensor:
        """Store and attend spans in one step → the relative distance of each token, `[T]`."""
        attention.prepare(self._step(spans))
        queries, keys, values = (
            torch.cat([tensor[one.sequence, one.start : one.stop] for one in spans])
            for tensor in (self.queries, self.keys, self.values)
        )
        attention.store(0, keys, values)
        got = attention.attend(0, queries, self.sinks).flatten(1).float()
        expected = torch.cat([self._expected(one) for one in spans])
        distances: Tensor = (got - expected).norm(dim=1) / expected.norm(dim=1)
        return distances

    def _expected(self, span: _Span) -> Tensor:
        """Return a span's attention `[t, Hq · Dv]`, computed plainly in fp32."""
        query = self.queries[span.sequence, span.start : span.stop].float()
        key, value = (
            tensor[span.sequence, : span.stop].float().transpose(0, 1)
            for tensor in (self.keys, self.values)
        )
        return attend(query, key, value, self.shape, self.sinks).flatten(1)

    def _step(self, spans: Sequence[_Span]) -> Step:
        on_pages = [Span(one.start, one.stop, self.pages[one.sequence]) for one in spans]
        nothing = np.zeros(0, np.int64)
        return paged_step(on_pages, self.page_size, self.queries.device, logit_rows=nothing)
