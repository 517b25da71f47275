"""A step is copied to its device as one buffer, and arrives unchanged."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidemill.engine.kernels.step import Step

NAMES = [f.name for f in fields(Step) if f.name not in ("num_decodes", "copy_on_host")]


@given(lengths=st.lists(st.integers(0, 9), min_size=len(NAMES), max_size=len(NAMES)))
def test_all_arrays_are_views_of_one_buffer(lengths: list[int]) -> None:
    """Each array has its own name and is int32, whatever its input dtype; some may be empty.

    Each begins at a multiple of 16 bytes: else kernels would be compiled for either.
    """
    numbers = np.arange(sum(lengths))
    parts = np.split(numbers, np.cumsum(lengths)[:-1])
    given_arrays = dict(zip(NAMES, parts, strict=True))
    given_arrays["pages"] = given_arrays["pages"].astype(np.int32)
    step = Step.pack(3, torch.device("cpu"), **given_arrays)
    assert step.num_decodes == 3
    buffers = set()
    for name, expected in given_arrays.items():
        array: torch.Tensor = getattr(step, name)
        assert array.dtype == torch.int32
        assert array.tolist() == expected.tolist()
        assert array.storage_offset() * array.itemsize % 16 == 0
        buffers.add(array.untyped_storage().data_ptr())
    assert len(buffers) == 1
    assert step.num_tokens == len(given_arrays["token_ids"])


def test_a_step_on_a_device_is_known_on_the_host_too() -> None:
    """The length of a span can be read without waiting for a device."""
    arrays = {name: np.arange(index + 1) for index, name in enumerate(NAMES)}
    there = Step.pack(0, torch.device("meta"), **arrays)
    here = Step.pack(0, torch.device("cpu"), **arrays)
    assert here.host is here
    for name in NAMES:
        assert getattr(there, name).device.type == "meta"
        assert torch.equal(getattr(there.host, name), getattr(here, name))
