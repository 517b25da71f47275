"""Flags of workers by the configuration of their model."""

from __future__ import annotations

from typing import Any

import pytest

from infra.config import Model
from infra.worker_flags import worker_flags


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({}, []),
        ({"gpus_per_worker": 4}, ["--tensor-parallel-size", "4"]),
        (
            {"gpus_per_worker": 4, "tensor_parallel_size": 2},
            ["--tensor-parallel-size", "2", "--data-parallel-size", "auto"],
        ),
        ({"gpus_per_worker": 4, "tensor_parallel_size": 1}, ["--data-parallel-size", "auto"]),
    ],
)
def test_gpus_share_the_model_or_have_an_engine_each(
    given: dict[str, Any], flags: list[str]
) -> None:
    """The configuration sets how many share it: by default all of a worker."""
    alone = worker_flags(Model(name="m", gpu="l4"))
    assert worker_flags(Model(name="m", gpu="l4", **given)) == [*alone, *flags]
