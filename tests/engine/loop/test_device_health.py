"""A verdict on the device: a probe, a canary, and failures that are the machine's by their kind."""

from __future__ import annotations

import subprocess
import time
from collections import deque
from collections.abc import Callable

import pytest
import torch

from tidemill.engine.errors import DeviceFailed, RankFailed
from tidemill.engine.loop import device_health
from tidemill.engine.loop.device_health import (
    Failure,
    attempt,
    probe,
    refuse_machine_failure,
    run_canaries,
)

CPU = torch.device("cpu")


def raising(error: BaseException) -> Callable[..., bool]:
    """Return a function that raises an error, whatever it is given."""

    def call(*_: object) -> bool:
        raise error

    return call


def test_a_device_that_computes_passes_a_probe() -> None:
    """Nothing is raised."""
    probe(CPU)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (raising(RuntimeError("CUDA error: unspecified\nmore")), r"\(cpu\) has failed: CUDA error"),
        (lambda _: 17.0, "wrong numbers: 17, not 4096"),
    ],
)
def test_a_device_that_fails_or_errs_does_not(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[..., float], words: str
) -> None:
    """And it is said how."""
    monkeypatch.setattr(device_health, "_sum_on", answer)
    with pytest.raises(DeviceFailed, match=words):
        probe(CPU)


def test_a_device_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up after some seconds."""
    monkeypatch.setattr(device_health, "_sum_on", lambda _: time.sleep(1))
    with pytest.raises(DeviceFailed, match="does not respond"):
        probe(CPU, seconds=0.01)


def test_a_device_without_memory_computes_for_all_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller steps may do."""
    monkeypatch.setattr(device_health, "_sum_on", raising(torch.OutOfMemoryError()))
    probe(CPU)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), subprocess.CalledProcessError(1, "gcc")]
)
def test_some_failures_are_the_machines_by_their_kind(error: Exception) -> None:
    """No request can fill a disk or break a compiler."""
    failure = attempt(raising(error))
    assert isinstance(failure, Failure)
    with pytest.raises(DeviceFailed, match="repeatedly"):
        refuse_machine_failure(failure)


def test_others_may_be_a_requests() -> None:
    """They are told in words for it, and hold nothing of the step."""
    failure = attempt(raising(ValueError("odd")), "recording")
    assert failure == Failure("odd", "The engine failed on this recording: odd")
    refuse_machine_failure(failure)


def test_a_failure_that_comes_again_is_logged_in_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it came from is told once; a step is tried many times before there is a verdict."""
    monkeypatch.setattr(device_health, "_logged", deque[str]())
    error = ValueError("only here")
    for _ in range(2):
        attempt(raising(error))
    assert [record.exc_info is not None for record in caplog.records] == [True, False]
    assert caplog.records[1].getMessage() == "a step failed again: ValueError: only here"


def test_what_ends_the_engine_is_no_failure_of_a_step() -> None:
    """It is raised as it is."""
    with pytest.raises(RankFailed):
        attempt(raising(RankFailed("rank 1")))


def test_one_canary_with_finite_numbers_will_do() -> None:
    """A single token of the vocabulary may be odd."""
    asked: list[int] = []

    def is_finite(token_id: int) -> bool:
        asked.append(token_id)
        return len(asked) > 1

    run_canaries(is_finite, 30)
    assert asked == [0, 10]


@pytest.mark.parametrize("is_finite", [lambda _: False, raising(RuntimeError("launch failed"))])
def test_a_canary_that_fails_is_a_verdict(is_finite: Callable[[int], bool]) -> None:
    """Whether it raises or comes to nothing."""
    with pytest.raises(DeviceFailed):
        run_canaries(is_finite, 30)
