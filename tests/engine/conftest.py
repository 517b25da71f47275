"""Engine tests run tiny models: one thread each is faster than waking a second."""

from __future__ import annotations

import numba
import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
    numba.set_num_threads(1)
