"""Sparse attention to latents on GPUs; its reference is `engine.kernels.sparse_latent`.

Steps without a long sequence run the kernels of latents, in CUDA graphs, too. Selections are made
and attended to in torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ..attention import ANY_PROGRAMS
from ..sparse_latent import SparseLatentAttention
from . import qkv as qkv_kernels
from .latent import TritonLatentAttention


class TritonSparseLatentAttention(SparseLatentAttention):
    """Latents and index keys on a GPU, with a trash page after the last; a `CapturableBackend`.

    Only steps without a long sequence are captured.
    """

    latents_type = TritonLatentAttention
    copies_slots = TritonLatentAttention.copies_slots
    all_launches = TritonLatentAttention.all_launches
    num_trash_pages = 1
    _latents: TritonLatentAttention

    @property
    def trash_slot(self) -> int:
        """Return the slot of tokens that fill up a captured step."""
        return self._latents.trash_slot

    @property
    def launches(self) -> int:
        """Return the kernels that the prepared step needs and not every step does."""
        return self._latents.launches

    @property
    def programs(self) -> int:
        """Return the prepared step's numbers of programs."""
        return self._latents.programs

    def allocate_workspace(self, num_tokens: int, num_decodes: int) -> None:
        """Allocate the buffers of captured steps; see `CapturableBackend`."""
        self._latents.allocate_workspace(num_tokens, num_decodes)

    @contextmanager
    def capturing(
        self,
        num_tokens: int,
        launches: int,
        num_spans: int | None = None,
        programs: int = ANY_PROGRAMS,
    ) -> Iterator[None]:
        """Launch for any step of this kind; see `CapturableBackend`."""
        with self._latents.capturing(num_tokens, launches, num_spans, programs):
            yield

    def store_index_keys(self, layer: int, key: Tensor) -> None:
        """Write the step's index keys; see `SparseLatentBackend`."""
        pages = self._index_keys[layer]
        qkv_kernels.store_latents(key[:, None].to(pages.dtype), self._slots, pages)
