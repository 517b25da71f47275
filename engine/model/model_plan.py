"""Values of a plan: how a model will run, how much memory it needs, and code for all plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import torch

from ..config import EngineConfig
from ..errors import OutOfCacheMemory
from ..kernels.attention import AttentionShape
from ..kernels.backends import choose_backend
from ..kernels.quantised import FP8
from ..kernels.recurrence import RecurrentShape
from ..kernels.reference import ReferenceAttention
from ..storage.gguf.unpacked import has_weights
from ..storage.hub import find_file, find_gguf
from .config.device import has_gpu, step_limits
from .config.hf_config import CONFIG
from .network.kv_cache_size import divide_memory, free_bytes, most_tokens
from .network.loaded_model import LoadedModel, Network
from .weights.checkpoint import INDEX, WHOLE, Checkpoint, find_checkpoint, missing_files
from .weights.quantised.quantization_config import QuantizationConfig

Runs = Literal["native", "transformers"]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of one rank in bytes: its weights, a token's keys and values, a sequence's state.

    `kv_cache_tokens` fit into free memory in addition to the weights and the recurrent states of
    `state_rows` sequences and snapshots. It is 0 if not even the weights fit, None for a GPU on
    another machine.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    kv_cache_tokens: int | None
    state_bytes_per_sequence: int
    state_rows: int | None


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Plan of a model: `why` transformers runs it, None if the engine's own decoder does.

    `tensor_parallel_sizes` are the numbers of ranks that can share it. `memory` is None if it is
    unknown before a load. `notes` are sentences for the user.
    """

    runs: Runs
    why: str | None
    class_name: str
    device: torch.device
    dtype: torch.dtype
    quantization: str | None
    max_model_len: int
    memory: MemoryPlan | None
    tensor_parallel_sizes: tuple[int, ...] = ()
    takes_adapters: bool = False
    takes_images: bool = False
    takes_audio: bool = False
    notes: tuple[str, ...] = ()


def find_weights(
    name: str, quantization: QuantizationConfig | None = None
) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Return a model's weights, None if files are missing; a note then explains the download.

    Only an index is fetched, and no GGUF file is dequantized. `ModelRefused` names problems with
    the files that exist.
    """
    gguf = find_gguf(name)
    if gguf is not None and not has_weights(gguf):
        return None, ("the first load dequantizes its weights and caches them",)
    if gguf is not None:
        return find_checkpoint(name, quantization), ()
    if Path(name).is_dir():
        if missing_files(Path(name)):
            return None, ()
        return find_checkpoint(name, quantization), ()
    config = find_file(name, CONFIG)
    assert config is not None  # it was read
    folder = config.parent
    if not (folder / WHOLE).exists():
        find_file(name, INDEX)
    if missing_files(folder):
        return None, (
            "its weights, or some of them, are not downloaded yet: a load downloads them",
        )
    return replace(find_checkpoint(str(folder), quantization), name=name), ()


def plan_memory(
    settings: EngineConfig,
    shapes: Sequence[AttentionShape],
    weight_bytes: int,
    *,
    recurrent_shapes: Sequence[RecurrentShape] = (),
    dtype: torch.dtype,
    device: torch.device,
    widths: tuple[int, int],
    vocab_size: int,
    max_model_len: int,
) -> MemoryPlan:
    """Return the memory of a network; `widths` are its hidden and its widest intermediate one."""
    is_here = device.type == "cpu" or has_gpu()
    model = LoadedModel(
        network=cast("Network", None),  # only sizes are used
        shapes=tuple(shapes),
        backend=choose_backend(shapes, dtype, device) if is_here else ReferenceAttention,
        dtype=dtype,
        device=device,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        hidden_size=widths[0],
        max_intermediate_size=widths[1],
        recurrent_shapes=tuple(recurrent_shapes),
    )
    if not is_here:  # a token needs as much in any backend
        cache_dtype = dtype if settings.kv_cache_dtype == "auto" else FP8
        model = replace(model, cache_dtype=cache_dtype)
        return MemoryPlan(weight_bytes, model.token_bytes, None, model.row_bytes, None)
    if settings.kv_cache_dtype != "auto":
        model = model.with_kv_cache_dtype(FP8)
    try:
        free = free_bytes(device) - weight_bytes
        num_pages, num_rows = divide_memory(model, settings, free=free)
    except OutOfCacheMemory:
        num_pages = num_rows = 0
    num_tokens = most_tokens(model, step_limits(settings, device), num_pages)
    return MemoryPlan(weight_bytes, model.token_bytes, num_tokens, model.row_bytes, num_rows)
