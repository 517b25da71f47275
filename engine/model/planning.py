"""Planning of a text-generation model: how it will run and in how much memory, before a load.

It reads config.json and the headers of the weights. It assumes that the parity check, which only a
load can run, passes.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from ..config import EngineConfig
from ..errors import ModelRefused, TransformersRefused
from ..kernels.backends import has_quantised_linear
from ..kernels.communicator import Shard
from .config.architecture import Architecture
from .config.device import choose_dtype, choose_planned_device, context_length
from .config.hf_config import HFConfig, UnsupportedConfig
from .config.transformers_fields import notes_on_ignored
from .families.overridden_config import read_overridden_config, with_context
from .families.registry import FAMILIES, architecture_of
from .loading import (
    check_int8,
    notes_on_media,
    notes_on_quantization,
    read_vision,
    refuse_native_settings,
    refused_by_both,
)
from .model_plan import ModelPlan, find_weights, plan_memory
from .tensor_parallel import check_tensor_parallel_size, shard_architecture
from .weights.quantised.loading import is_made
from .weights.quantised.quantization_config import (
    QuantizationConfig,
    read_quantization_config,
)
from .weights.weight_map import weights_of
from .weights.weights import as_stored, find_layout

MAX_GPUS = 8
"""GPUs of one machine."""


def plan_model(settings: EngineConfig) -> ModelPlan:
    """Return the plan of a model; `ModelRefused` explains why it would not be served."""
    hf_config = read_overridden_config(settings)
    try:
        return _plan_native(settings, hf_config)
    except UnsupportedConfig as exc:
        why = str(exc)
    is_shared = settings.tensor_parallel_size > 1
    quantization = refuse_native_settings(settings, hf_config, why, is_shared=is_shared)
    from .hf.plan import plan_transformers

    try:
        plan = plan_transformers(settings, with_context(hf_config, settings), why, quantization)
    except TransformersRefused as exc:
        raise refused_by_both(hf_config, why, exc) from exc
    return replace(plan, notes=(*plan.notes, *notes_on_media(hf_config)))


def _plan_native(settings: EngineConfig, hf_config: HFConfig) -> ModelPlan:
    quantization = read_quantization_config(hf_config, settings.quantization)
    architecture = architecture_of(hf_config)
    size = settings.tensor_parallel_size
    check_tensor_parallel_size(settings.model, architecture, size, quantization)
    device = choose_planned_device(settings.device)
    dtype = choose_dtype(settings.dtype, hf_config.dtype, device)
    if settings.quantization == "int8":
        check_int8(settings.model, dtype, device)
    checkpoint, notes = find_weights(settings.model, quantization)
    if checkpoint is not None:
        architecture = as_stored(checkpoint, architecture)
        wanted = list(weights_of(architecture))
        find_layout(checkpoint, architecture, wanted, is_multimodal=hf_config.is_multimodal)
    share = shard_architecture(architecture, Shard(0, size))
    weight_bytes = _weight_bytes(architecture, quantization, dtype, device, size=size)
    vision, blind = read_vision(checkpoint, hf_config)
    tower_bytes = 0
    if checkpoint is not None and vision is not None:
        from .vision.tower import check_tower

        tower_bytes = check_tower(checkpoint, hf_config, vision) * dtype.itemsize
    if checkpoint is not None and _stays_quantised(quantization, dtype, device):
        weight_bytes = max(checkpoint.num_bytes - tower_bytes, 0) // size
    max_model_len = context_length(settings, architecture.max_positions)
    return ModelPlan(
        runs="native",
        why=None,
        class_name=architecture.class_name,
        device=device,
        dtype=dtype,
        quantization=None if quantization is None else quantization.method,
        max_model_len=max_model_len,
        memory=plan_memory(
            settings,
            share.attention_shapes,
            weight_bytes + tower_bytes,
            recurrent_shapes=share.recurrent_shapes,
            dtype=dtype,
            device=device,
            widths=(architecture.hidden_size, share.max_intermediate_size),
            vocab_size=architecture.vocab_size,
            max_model_len=max_model_len,
        ),
        tensor_parallel_sizes=_tensor_parallel_sizes(architecture, quantization),
        takes_adapters=FAMILIES[hf_config.model_type].takes_adapters,
        takes_images=vision is not None and not vision.hears,
        takes_audio=vision is not None and vision.hears,
        notes=(
            *notes,
            *notes_on_ignored(
                hf_config.where, architecture.class_name, architecture.ignored_fields
            ),
            *blind,
            *notes_on_quantization(quantization, dtype, device),
        ),
    )


def _weight_bytes(
    architecture: Architecture,
    quantization: QuantizationConfig | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    size: int,
) -> int:
    """Return the bytes of a rank's weights, except for those that stay as they are stored."""
    method = "" if quantization is None else quantization.product
    keeps = quantization is not None and has_quantised_linear(dtype, device, method)
    num_bytes = 0
    for weight in weights_of(architecture, shard=Shard(0, size)):
        is_quantised = keeps and is_made(weight, method)
        num_bytes += prod(weight.shape) * (1 if is_quantised else dtype.itemsize)
    return num_bytes


def _stays_quantised(
    quantization: QuantizationConfig | None, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether weights are served as they are stored."""
    if quantization is None or quantization.is_made_at_load:
        return False
    return has_quantised_linear(dtype, device, quantization.product)


def _tensor_parallel_sizes(
    architecture: Architecture, quantization: QuantizationConfig | None
) -> tuple[int, ...]:
    """Return how many GPUs of a machine can share a model."""
    sizes = []
    for size in range(2, MAX_GPUS + 1):
        try:
            check_tensor_parallel_size("", architecture, size, quantization)
        except ModelRefused:
            continue
        sizes.append(size)
    return tuple(sizes)
