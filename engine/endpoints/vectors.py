"""Vectors in bodies: numbers, or their bytes in base64; floats, or smaller elements."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.protocol.embeddings import OutputDtype
from tidemill.protocol.errors import InternalError, RequestError

PACKED = frozenset({"binary", "ubinary"})
"""Element types with eight dimensions in a byte."""

_INT8_SCALE = 127.0

# torch's limit: shorter vectors are not normalized.
_LEAST_LENGTH = 1e-12
# Nine digits distinguish any two fp32 values; with fewer than seven, the last of seven are zeros.
_DIGITS = (9, 8, 7)


def converted(vector: NDArray[np.float32], dtype: OutputDtype) -> NDArray[Any]:
    """Return a vector `[D]` with elements of a type.

    `int8` is 127 × the value, rounded, and `uint8` is 128 more; values must be from -1 to 1.
    `ubinary` has a bit for each dimension, which is 1 above zero, the first in the highest bit of
    the first byte: `[D/8]`; `binary` is 128 less.
    """
    found: NDArray[Any] = vector
    if dtype in PACKED:
        bits = np.packbits(vector > 0)
        found = bits if dtype == "ubinary" else (bits ^ np.uint8(128)).view(np.int8)
    elif dtype in {"int8", "uint8"}:
        scaled = np.rint(vector * _INT8_SCALE).astype(np.int8)
        found = scaled if dtype == "int8" else scaled.view(np.uint8) ^ np.uint8(128)
    elif dtype == "float16":
        with np.errstate(over="ignore"):
            found = vector.astype(np.float16)
    if not np.isfinite(found).all():
        raise RequestError(
            "`output_dtype` cannot be 'float16': the vector has a value beyond ±65,504.",
            param="output_dtype",
        )
    return found


def as_numbers(vector: NDArray[Any]) -> list[float]:
    """Return a vector `[D]` as numbers, with the fewest digits that preserve their fp32 values.

    Printed as a double, as Python does, an fp32 number has 17 digits: most of them are noise, and a
    row is twice as long.
    """
    if vector.dtype != np.float32:
        return list(vector.tolist())
    exact = vector.astype(np.float64)
    magnitude = np.abs(exact)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        exponent = np.floor(np.log10(magnitude))
        exponent[~np.isfinite(exponent)] = 0.0
        scale = 10.0 ** (_DIGITS[0] - 1 - exponent)
        shown = exact.copy()
        for _ in _DIGITS:
            rounded = np.rint(exact * scale) / scale
            np.copyto(shown, rounded, where=rounded.astype(np.float32) == vector)
            scale /= 10.0
    return list(shown.tolist())


def as_base64(vector: NDArray[Any]) -> str:
    """Return the elements of a vector `[D]`, little-endian, in base64."""
    little_endian = vector.dtype.newbyteorder("<")
    return b64encode(vector.astype(little_endian, copy=False).tobytes()).decode("ascii")


def check_finite(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the model's values; raise `InternalError` if some are not finite."""
    if not np.isfinite(values).all():
        raise InternalError("The model's output is not finite.")
    return values


def softmax(logits: NDArray[Any]) -> NDArray[Any]:
    """Return the probabilities of logits `[L]`, or of each row of `[t, L]`, with their type."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities: NDArray[Any] = shifted / shifted.sum(axis=-1, keepdims=True)
    return probabilities


def normalize(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a vector `[D]`, or each of `[n, D]`, with L2 norm 1; zeros stay unchanged."""
    length = np.linalg.norm(vector.astype(np.float64), axis=-1, keepdims=True)
    scaled: NDArray[np.float32] = (vector / np.maximum(length, _LEAST_LENGTH)).astype(np.float32)
    return scaled
