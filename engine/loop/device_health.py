"""Device health: a verdict on the device, which comes before any verdict on a request.

After a failure that a device does not recover from, such as an illegal address, each call of it
fails; one that hangs answers nothing. A probe, a few numbers computed and read back, finds out
either. What it cannot find, a canary does: a step of one token, run before a request is blamed.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

import torch

from tidemill.protocol.contract import EngineError

from ..errors import DeviceFailed, MachineFailed, first_line_of

logger = logging.getLogger(__name__)

PROBE_SECONDS = 30.0
OUT_OF_MEMORY = "out_of_memory"

_NUMBERS = 64
# Failures of late, the same of which comes many times before there is a verdict.
_logged: deque[str] = deque(maxlen=16)

T = TypeVar("T")


class Failure(NamedTuple):
    """A step's failure, and the error message for the one request that may be to blame."""

    cause: str
    words: str
    code: str = "internal_error"
    is_of_machine: bool = False  # by its kind: a full disk, a compiler that cannot run

    @property
    def is_for_want_of_memory(self) -> bool:
        """Say whether a smaller step might do."""
        return self.code == OUT_OF_MEMORY


def attempt(call: Callable[[], T], subject: str = "request") -> T | Failure:
    """Do what the device may fail at; what ends the engine is raised."""
    try:
        return call()
    except Exception as exc:  # noqa: BLE001 - returned as a Failure, and logged
        return failure_of(exc, subject)


def failure_of(exc: Exception, subject: str = "request") -> Failure:
    """Return what an exception of a step says; what ends the engine is raised.

    What is returned holds no frame of the exception, and so no tensor of the step.
    """
    if isinstance(exc, EngineError):
        raise exc
    if isinstance(exc, torch.OutOfMemoryError):
        words = f"The engine is out of memory for this {subject}, even when it runs alone."
        return Failure("out of memory", words, OUT_OF_MEMORY)
    _log(exc)
    words = f"The engine failed on this {subject}: {exc}"
    is_of_machine = isinstance(exc, OSError | subprocess.SubprocessError)
    return Failure(first_line_of(exc), words, is_of_machine=is_of_machine)


def _log(exc: Exception) -> None:
    """Log a step's failure, with where it came from unless that has been told lately."""
    kind = f"{type(exc).__name__}: {first_line_of(exc)}"
    if kind in _logged:
        logger.error("a step failed again: %s", kind)
    else:
        _logged.append(kind)
        logger.error("a step failed: %s", kind, exc_info=exc)


def probe(device: torch.device, seconds: float = PROBE_SECONDS) -> None:
    """Have a device add some numbers up; raises `DeviceFailed` where it fails, hangs or errs."""
    answer: Future[float] = Future()

    def compute() -> None:
        try:
            answer.set_result(_sum_on(device))
        except torch.OutOfMemoryError:  # it computes, but for want of room
            answer.set_result(_NUMBERS**2)
        except Exception as exc:  # noqa: BLE001 - raised again where it is waited for
            answer.set_exception(exc)

    threading.Thread(target=compute, name="tidemill-probe", daemon=True).start()
    try:
        total = answer.result(seconds)
    except TimeoutError as exc:
        raise DeviceFailed(
            f"the device ({device}) does not answer: a probe of it took more than {seconds:g} s"
        ) from exc
    except Exception as exc:
        raise DeviceFailed(f"the device ({device}) has failed: {first_line_of(exc)}") from exc
    if total != _NUMBERS**2:
        raise MachineFailed(
            f"the device ({device}) computes wrong numbers: {total:g}, not {_NUMBERS**2}"
        )


def refuse_machine_failure(failure: Failure) -> None:
    """Raise `MachineFailed` for a failure that came twice and is the machine's by its kind."""
    if failure.is_of_machine:
        raise MachineFailed(f"the machine fails again and again: {failure.cause}")


def run_canaries(is_finite: Callable[[int], bool], vocab_size: int) -> None:
    """Run a step of one token that says whether its numbers are finite; another where they are not.

    Raises `DeviceFailed` where such a step fails, or none of a few tokens has finite numbers.
    """
    for token_id in sorted({0, vocab_size // 3, vocab_size // 2}):
        came = attempt(lambda token_id=token_id: is_finite(token_id))  # type: ignore[misc]
        if isinstance(came, Failure):
            raise DeviceFailed(f"a step of one token fails as well: {came.cause}")
        if came:
            return
    raise DeviceFailed("the model's numbers are not finite, whatever it is asked")


def _sum_on(device: torch.device) -> float:
    numbers = torch.arange(_NUMBERS, dtype=torch.float32).to(device)
    return float((2 * numbers + 1).sum())
