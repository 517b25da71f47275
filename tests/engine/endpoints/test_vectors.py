"""Vectors in a body: parsed values equal the model's output, bit for bit."""

from __future__ import annotations

from base64 import b64decode

import numpy as np
import pytest
from pydantic_core import from_json, to_json

from tidemill.engine.endpoints.vectors import as_base64, as_numbers

_FLOAT = np.finfo(np.float32)
EDGES = [0.0, -0.0, 1.0, 0.1, 16_777_216.0, _FLOAT.max, _FLOAT.tiny, _FLOAT.smallest_subnormal]


def _vector(scale: float) -> np.ndarray:
    return (np.random.default_rng(7).standard_normal(4096) * scale).astype(np.float32)


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 0.03, 1.0, 1e6, 1e30])
def test_printed_numbers_are_read_back_as_the_same_floats(scale: float) -> None:
    """Floats of any size lose no bit in JSON."""
    vector = _vector(scale)
    read = np.array(from_json(to_json(as_numbers(vector))), dtype=np.float32)
    assert read.tobytes() == vector.tobytes()


def test_floats_at_the_edges_are_read_back_as_they_were() -> None:
    """Zeros of either sign, the largest, the smallest and subnormal floats keep all their bits."""
    vector = np.array([*EDGES, *(-edge for edge in EDGES)], dtype=np.float32)
    read = np.array(from_json(to_json(as_numbers(vector))), dtype=np.float32)
    assert read.tobytes() == vector.tobytes()


def test_numbers_of_a_unit_vector_have_as_few_digits_as_floats_need() -> None:
    """A number is printed as numpy prints the float, not with the 17 digits of a double."""
    vector = _vector(0.03)
    for number, value in zip(as_numbers(vector), vector, strict=True):
        assert repr(number) == repr(float(str(value)))


def test_values_that_are_not_finite_do_not_change() -> None:
    """A float that JSON cannot represent is left to the code that serializes the row."""
    shown = as_numbers(np.array([np.nan, np.inf, -np.inf, 0.5], dtype=np.float32))
    assert str(shown) == "[nan, inf, -inf, 0.5]"


def test_base64_holds_the_floats_lowest_byte_first() -> None:
    """The bytes are what `numpy.frombuffer` of OpenAI's client expects."""
    vector = _vector(1.0)[::2]
    assert np.array_equal(np.frombuffer(b64decode(as_base64(vector)), dtype="<f4"), vector)
