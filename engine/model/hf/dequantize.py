"""Weights by the names of an unquantised checkpoint, quantised ones dequantised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from ...errors import ModelRefused
from ...kernels.quantised import Matrix, as_tensor
from ..config.architecture import Architecture
from ..config.hf_config import HFConfig
from ..families.registry import architecture_of
from ..network.kv_cache_size import free_bytes
from ..weights.checkpoint import FLOATS, Checkpoint
from ..weights.quantised.loading import IGNORED, STACKED_AXES, matrices_of, plan_loading
from ..weights.weight_map import weights_of
from ..weights.weight_parts import Weight, whole
from ..weights.weights import check_stored, fill_weights, find_stored, read_weights

CPU = torch.device("cpu")
# Host memory of a network while it is built, as a multiple of its weights.
ROOM = 1.25


def dequantised_copy(
    checkpoint: Checkpoint, hf_config: HFConfig, device: torch.device, num_layers: int | None
) -> dict[str, Tensor]:
    """Return a decoder's weights in fp32, or those of its first layers, by stored names."""
    architecture = architecture_of(hf_config)
    weights = read_weights(
        checkpoint,
        architecture,
        torch.float32,
        device,
        is_multimodal=hf_config.is_multimodal,
        num_layers=num_layers,
    )
    architecture = replace(architecture, blocks=architecture.blocks[:num_layers])
    return with_tied_head(architecture, weights, by_stored_names(weights_of(architecture), weights))


def by_stored_names(wanted: Iterable[Weight], weights: Mapping[str, Matrix]) -> dict[str, Tensor]:
    """Return weights by the names under which their parts are stored."""
    copied: dict[str, Tensor] = {}
    for weight in wanted:
        for part in weight.parts:
            own = part.place(as_tensor(weights[weight.role])).reshape(part.read_shape)
            if part.read_shape != part.shape:
                stored = copied.setdefault(part.key, own.new_empty(part.shape))
                stored[tuple(slice(taken.start, taken.stop) for taken in part.taken)] = own
            else:
                copied[part.key] = own
    return copied


def with_tied_head(
    architecture: Architecture, weights: Mapping[str, Matrix], copied: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return weights with the head of a model that ties it: the embedding, or the stored one."""
    if not architecture.tie_word_embeddings:
        return copied
    head = f"{architecture.names.lm_head}.weight"
    return {**copied, head: as_tensor(weights.get("lm_head", weights["embed_tokens"]))}


def dequantised_state(
    checkpoint: Checkpoint,
    title: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_multimodal: bool,
) -> dict[str, Tensor]:
    """Return a checkpoint's weights on the host, quantised ones dequantised, for a class `title`.

    `ModelRefused` names missing weights, or a lack of memory on the host or a device.
    """
    name, quantization = checkpoint.name, checkpoint.quantization
    assert quantization is not None
    stored = find_stored(checkpoint.files, (), is_multimodal=is_multimodal)
    matrices = list(matrices_of(quantization, stored))
    needed = plan_loading(name, quantization, matrices, stored).tensors()
    keys = {part.key for weight in needed for part in weight.parts}
    used = {key: tensor for key, tensor in stored.items() if key in keys}
    check_stored(checkpoint, title, needed, used, is_multimodal=is_multimodal)
    wanted = matrices + [
        whole(key, key, *tensor.shape)
        for key, tensor in stored.items()
        if key not in keys and tensor.kind in FLOATS and not IGNORED.search(key)
    ]
    _check_room(checkpoint, title, wanted, dtype, device)

    def fill(several: Sequence[Weight]) -> dict[str, Tensor]:
        return fill_weights(name, several, stored, dtype, CPU)

    state = {}
    for key, weight in plan_loading(name, quantization, wanted, stored).read(fill, dtype, CPU):
        plain = as_tensor(weight)
        # Stacked experts are stored transposed if they are not quantised.
        is_turned = plain.ndim == STACKED_AXES and key not in stored
        state[key] = plain.transpose(1, 2).contiguous() if is_turned else plain
    return state


def _check_room(
    checkpoint: Checkpoint,
    title: str,
    wanted: Sequence[Weight],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    num_bytes = sum(prod(weight.shape) for weight in wanted) * dtype.itemsize
    for where, needs in ((CPU, int(ROOM * num_bytes)), (device, num_bytes)):
        if (free := free_bytes(where)) < needs:
            raise ModelRefused(
                f"{checkpoint.name}: transformers' {title} runs this model, which requires "
                f"dequantising its weights: as {dtype} they take {num_bytes:,} bytes, and loading "
                f"them needs {needs:,} bytes on {where.type}, where {free:,} are free; use a "
                "larger machine or a smaller model."
            )
