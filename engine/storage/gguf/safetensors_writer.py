"""Weights of a GGUF file as one safetensors file with transformers' names and order."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from .families import StoredWeight
from .header import GGUFHeader
from .tensors import FLOATS, read_parts

_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def stored_kind(header: GGUFHeader, weight: StoredWeight) -> str:
    """Return the type of a weight in safetensors: bf16 for a quantized weight."""
    return FLOATS.get(header.tensors[weight.tensor].kind, "BF16")


def num_bytes(header: GGUFHeader, weights: Sequence[StoredWeight]) -> int:
    """Return the size in bytes of the weights in the safetensors file."""
    return sum(prod(one.shape) * _BYTES[stored_kind(header, one)] for one in weights)


def write_safetensors(header: GGUFHeader, weights: Sequence[StoredWeight], path: Path) -> None:
    """Write the weights to a new file, a few rows at a time."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for weight in weights:
        kind = stored_kind(header, weight)
        end = offset + prod(weight.shape) * _BYTES[kind]
        entries[weight.name] = {
            "dtype": kind,
            "shape": list(weight.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4
    with (
        FileIO(header.path) as stored,
        path.open("wb") as target,
        ThreadPoolExecutor(num_threads, "tidemill-dequantize") as pool,
    ):
        target.write(len(text).to_bytes(8, "little") + text)
        for weight in weights:
            parts = read_parts(
                header,
                stored,
                header.tensors[weight.tensor],
                pool,
                num_threads,
                expert=weight.expert,
                permuted_heads=weight.permuted_heads,
                offset=weight.offset,
            )
            for part in parts:
                target.write(np.ascontiguousarray(part).data)
