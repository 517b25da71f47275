"""Verdicts on the device: a probe, a canary, and failures of the machine."""

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
    """Return a function that raises an error, for any arguments."""

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
        (lambda _: 17.0, "wrong numbers: 17 instead of 4096"),
    ],
)
def test_a_device_that_fails_or_errs_does_not(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[..., float], words: str
) -> None:
    """The error contains the failure."""
    monkeypatch.setattr(device_health, "_sum_on", answer)
    with pytest.raises(DeviceFailed, match=words):
        probe(CPU)


def test_a_device_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe gives up after some seconds."""
    monkeypatch.setattr(device_health, "_sum_on", lambda _: time.sleep(1))
    with pytest.raises(DeviceFailed, match="does not respond"):
        probe(CPU, seconds=0.01)


def test_a_device_without_free_memory_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller steps may succeed."""
    monkeypatch.setattr(device_health, "_sum_on", raising(torch.OutOfMemoryError()))
    probe(CPU)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), subprocess.CalledProcessError(1, "gcc")]
)
def test_some_kinds_of_failure_are_the_machines(error: Exception) -> None:
    """No request can fill a disk or break a compiler."""
    failure = attempt(raising(error))
    assert isinstance(failure, Failure)
    with pytest.raises(DeviceFailed, match="repeatedly"):
        refuse_machine_failure(failure)


def test_other_failures_may_be_a_requests() -> None:
    """Their message is for the request, and they hold nothing of the step."""
    failure = attempt(raising(ValueError("odd")), "recording")
    assert failure == Failure("odd", "The engine failed on this recording: odd")
    refuse_machine_failure(failure)


def test_a_failure_that_comes_again_is_logged_in_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traceback is logged once; a step is tried many times before there is a verdict."""
    monkeypatch.setattr(device_health, "_logged", deque[str]())
    error = ValueError("only here")
    for _ in range(2):
        attempt(raising(error))
    assert [record.exc_info is not None for record in caplog.records] == [True, False]
    assert caplog.records[1].getMessage() == "a step failed again: ValueError: only here"


def test_an_error_that_ends_the_engine_is_not_a_step_failure() -> None:
    """It is raised unchanged."""
    with pytest.raises(RankFailed):
        attempt(raising(RankFailed("rank 1")))


def test_one_canary_with_finite_values_is_enough() -> None:
    """A single token of the vocabulary may be odd."""
    token_ids: list[int] = []

    def is_finite(token_id: int) -> bool:
        token_ids.append(token_id)
        return len(token_ids) > 1

    run_canaries(is_finite, 30)
    assert token_ids == [0, 10]


@pytest.mark.parametrize("is_finite", [lambda _: False, raising(RuntimeError("launch failed"))])
def test_a_canary_that_fails_is_a_verdict(is_finite: Callable[[int], bool]) -> None:
    """It may raise or return False."""
    with pytest.raises(DeviceFailed):
        run_canaries(is_finite, 30)
