"""Vectors in bodies: numbers, or the bytes of their floats in base64."""

from __future__ import annotations

from base64 import b64encode

import numpy as np
from numpy.typing import NDArray

from tidemill.protocol.errors import InternalError

# torch's limit: shorter vectors are not normalized.
_LEAST_LENGTH = 1e-12
# Nine digits distinguish any two fp32 values; with fewer than seven, the last of seven are zeros.
_DIGITS = (9, 8, 7)


def as_numbers(vector: NDArray[np.float32]) -> list[float]:
    """Return a vector `[D]` as numbers with the fewest digits that preserve their fp32 values.

    Printed as a double, as Python does, an fp32 number has 17 digits: most of them are noise, and a
    row is twice as long.
    """
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
    numbers: list[float] = shown.tolist()
    return numbers


def as_base64(vector: NDArray[np.float32]) -> str:
    """Return the floats of a vector `[D]`, little-endian, in base64."""
    return b64encode(vector.astype("<f4", copy=False).tobytes()).decode("ascii")


def check_finite(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the model's values; raise `InternalError` if some are not finite."""
    if not np.isfinite(values).all():
        raise InternalError("The model's output is not finite.")
    return values


def normalize(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a vector `[D]`, or each of `[n, D]`, with L2 norm 1; zeros stay unchanged."""
    length = np.linalg.norm(vector.astype(np.float64), axis=-1, keepdims=True)
    scaled: NDArray[np.float32] = (vector / np.maximum(length, _LEAST_LENGTH)).astype(np.float32)
    return scaled
