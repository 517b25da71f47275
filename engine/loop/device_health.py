"""Device health: a verdict on the device, which precedes any verdict on a request.

After an unrecoverable failure, such as an illegal address, every call to the device fails; a
hanging device answers nothing. A probe, a small sum that is computed and read back, detects both. A
canary detects the rest: a step of one token, run before a request is blamed.
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
# Recent failures, which may repeat many times before there is a verdict.
_logged: deque[str] = deque(maxlen=16)

T = TypeVar("T")


class Failure(NamedTuple):
    """A step's failure, and the error message for the one request that may be to blame."""

    cause: str
    words: str
    code: str = "internal_error"
    is_of_machine: bool = False  # judged by its kind, such as a full disk or a broken compiler

    @property
    def is_for_want_of_memory(self) -> bool:
        """Return whether a smaller step might succeed."""
        return self.code == OUT_OF_MEMORY


def attempt(call: Callable[[], T], subject: str = "request") -> T | Failure:
    """Return the result of a call, or its failure; raise an error that ends the engine."""
    try:
        return call()
    except Exception as exc:  # noqa: BLE001 - returned as a Failure, and logged
        return failure_of(exc, subject)


def failure_of(exc: Exception, subject: str = "request") -> Failure:
    """Return the failure of a step's exception; raise an error that ends the engine.

    The failure holds no frame of the exception, and so no tensor of the step.
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
    """Log a step's failure, with its traceback unless that was logged recently."""
    kind = f"{type(exc).__name__}: {first_line_of(exc)}"
    if kind in _logged:
        logger.error("a step failed again: %s", kind)
    else:
        _logged.append(kind)
        logger.error("a step failed: %s", kind, exc_info=exc)


def probe(device: torch.device, seconds: float = PROBE_SECONDS) -> None:
    """Compute a small sum on a device; raise `DeviceFailed` if it fails, hangs or is wrong."""
    answer: Future[float] = Future()

    def compute() -> None:
        try:
            answer.set_result(_sum_on(device))
        except torch.OutOfMemoryError:  # the device works, but has no free memory
            answer.set_result(_NUMBERS**2)
        except Exception as exc:  # noqa: BLE001 - raised again by `answer.result`
            answer.set_exception(exc)

    threading.Thread(target=compute, name="tidemill-probe", daemon=True).start()
    try:
        total = answer.result(seconds)
    except TimeoutError as exc:
        raise DeviceFailed(
            f"the device ({device}) does not respond: a probe took more than {seconds:g} s"
        ) from exc
    except Exception as exc:
        raise DeviceFailed(f"the device ({device}) has failed: {first_line_of(exc)}") from exc
    if total != _NUMBERS**2:
        raise MachineFailed(
            f"the device ({device}) computes wrong numbers: {total:g} instead of {_NUMBERS**2}"
        )


def refuse_machine_failure(failure: Failure) -> None:
    """Raise `MachineFailed` for a repeated failure whose kind is a machine's."""
    if failure.is_of_machine:
        raise MachineFailed(f"the machine fails repeatedly: {failure.cause}")


def run_canaries(is_finite: Callable[[int], bool], vocab_size: int) -> None:
    """Run steps of one token until one has finite numbers.

    Raises `DeviceFailed` if such a step fails, or if none of a few tokens has finite numbers.
    """
    for token_id in sorted({0, vocab_size // 3, vocab_size // 2}):
        result = attempt(lambda token_id=token_id: is_finite(token_id))  # type: ignore[misc]
        if isinstance(result, Failure):
            raise DeviceFailed(f"a step of one token fails as well: {result.cause}")
        if result:
            return
    raise DeviceFailed("the model's output is not finite for any input")


def _sum_on(device: torch.device) -> float:
    numbers = torch.arange(_NUMBERS, dtype=torch.float32).to(device)
    return float((2 * numbers + 1).sum())
