"""Weights of a GGUF file as one safetensors file of transformers' names and order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .families import StoredWeight
from .header import GGUFHeader
from .tensors import FLOATS, read_rows

_BF16_BYTES = 2
_BYTES = {"F32": 4, "F16": 2, "BF16": _BF16_BYTES}


def stored_kind(header: GGUFHeader, weight: StoredWeight) -> str:
    """Return the type of a weight in safetensors: bf16 for one that is quantized in the file."""
    return FLOATS.get(header.tensors[weight.tensor].kind, "BF16")


def num_bytes(header: GGUFHeader, weights: Sequence[StoredWeight]) -> int:
    """Return how many bytes the weights take in the safetensors file."""
    return sum(prod(one.shape) * _BYTES[stored_kind(header, one)] for one in weights)


def write_safetensors(header: GGUFHeader, weights: Sequence[StoredWeight], path: Path) -> None:
    """Write the weights to a new file, a few rows at a time."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for weight in weights:
        kind = stored_kind(header, weight)
        end = offset + prod(weight.shape) * _BYTES[kind]
        described[weight.name] = {
            "dtype": kind,
            "shape": list(weight.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    with FileIO(header.path) as stored, path.open("wb") as target:
        target.write(len(text).to_bytes(8, "little") + text)
        for weight in weights:
            parts = read_rows(
                header,
                stored,
                header.tensors[weight.tensor],
                expert=weight.expert,
                permuted_heads=weight.permuted_heads,
            )
            is_quantized = header.tensors[weight.tensor].kind not in FLOATS
            for part in parts:
                numbers = part - part.dtype.type(weight.offset) if weight.offset else part
                target.write(_bf16(numbers) if is_quantized else np.ascontiguousarray(numbers))


def _bf16(numbers: NDArray[np.float32]) -> NDArray[Any]:
    """Return fp32 numbers as bf16, rounded to nearest even."""
    import torch

    rounded = torch.from_numpy(numbers).to(torch.bfloat16)
    bits: NDArray[Any] = rounded.view(torch.int16).numpy()
    return bits
