"""Vectors in bodies: numbers, or the bytes of their floats in base64."""

from __future__ import annotations

from base64 import b64encode

import numpy as np
from numpy.typing import NDArray

from tidemill.protocol.errors import InternalError

# torch's, below which a vector is not normalized.
_LEAST_LENGTH = 1e-12
# Nine digits tell any two of fp32 apart; fewer than seven are seven of which the last are zeros.
_DIGITS = (9, 8, 7)


def as_numbers(vector: NDArray[np.float32]) -> list[float]:
    """Return the numbers of a vector `[D]`, each in the fewest digits that keep its fp32 value.

    Printed as a double, as Python does, a number of fp32 has 17 digits: most of them are noise, and
    a row is twice as long.
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
    """Return the floats of a vector `[D]`, four bytes each with the lowest first, in base64."""
    return b64encode(vector.astype("<f4", copy=False).tobytes()).decode("ascii")


def check_finite(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the model's values; `InternalError` if some are not finite."""
    if not np.isfinite(values).all():
        raise InternalError("The model gave numbers that are not finite.")
    return values


def normalize(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a vector `[D]`, or each of `[n, D]`, at L2 norm 1; one of zeros stays as it is."""
    length = np.linalg.norm(vector.astype(np.float64), axis=-1, keepdims=True)
    scaled: NDArray[np.float32] = (vector / np.maximum(length, _LEAST_LENGTH)).astype(np.float32)
    return scaled
