"""Predictions for a CPU's steps, compared with measurements."""

from __future__ import annotations

from functools import partial
from itertools import count
from math import inf

import pytest
import torch

from bench.gpu import prediction
from bench.gpu.counts import Form, kernels_of
from bench.gpu.prediction import Shape, foretold, spans_of, table
from bench.gpu.shapes import architecture
from bench.gpu.simulator import Limits, seconds_of


def test_a_table_has_a_line_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured and foretold twice, after the ceilings."""
    for name, value in {
        "RUNS": 2,
        "COPIED_BYTES": 1 << 16,
        "NUM_TOKENS": 64,
        "NUM_PLACES": 1024,
        "MAX_MODEL_LEN": 256,
        "CONTEXT": 32,
        "DECODES": 2,
    }.items():
        monkeypatch.setattr(prediction, name, value)
    shapes = (Shape(2, 20), Shape(1, 20, 2, 9))
    lines = list(table(architecture("tiny"), torch.float32, partial(next, count(0.0)), shapes))
    assert [line.split("|")[1].strip() for line in lines[-2:]] == [
        "2 × 1 after 20",
        "1 × 1 after 20 + 2 × 9",
    ]
    assert all(float(line.split("|")[2]) > 0 for line in lines[-2:])


def test_a_step_takes_the_time_of_its_kernels_and_the_hosts() -> None:
    """The products' time doubles if products take all of it, and calls are added."""
    model, shape = architecture("46m"), Shape(0, 0, 1, 512)
    machine = dict.fromkeys(("attention", "entry", "pass"), Limits(inf, inf, 0.0))
    slow, fast = (
        foretold(model, shape, {**machine, "product": Limits(inf, flops, 0.0)}, 0.5, Form())
        for flops in (1e9, 2e9)
    )
    assert slow - 0.5 == pytest.approx(2 * (fast - 0.5))
    calls = {**machine, "product": Limits(inf, inf, 1.0)}
    assert foretold(model, shape, calls, 0.0, Form()) == 4 * 12 + 1


def test_reading_and_multiplying_in_turn_takes_both_times() -> None:
    """They add up on one core; if bytes are prefetched, the longer of the two counts."""
    kernels = kernels_of(architecture("46m"), spans_of(Shape(8, 64)), Form())
    kernel = next(kernel for kernel in kernels if kernel.flops)
    machine = {kernel.kind: Limits(kernel.bytes / 2, kernel.flops / 3, 0.0)}
    in_turn = {kernel.kind: machine[kernel.kind]._replace(overlaps=False)}
    assert seconds_of(kernel, machine) == pytest.approx(3)
    assert seconds_of(kernel, in_turn) == pytest.approx(5)


def test_spans_are_those_of_the_shape() -> None:
    """There are single tokens after each context, then whole prompts, with one row each."""
    spans = spans_of(Shape(2, 30, 1, 7))
    assert spans.starts.tolist() == [30, 30, 0]
    assert spans.stops.tolist() == [31, 31, 7]
    assert spans.num_rows == 3
