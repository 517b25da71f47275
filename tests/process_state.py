"""State of the test process that a test must restore, because later tests depend on it.

Warning filters are not included: pytest restores them after each test. A singleton is compared once
its module is imported; importing it in a test is not a change.
"""

from __future__ import annotations

import _locale
import _signal
import asyncio
import concurrent.futures.thread
import gc
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

# pytest changes the variable between the phases of one test.
_PHASE: Final = b"PYTEST_CURRENT_TEST"
# Set by the first import of torch's compiler, our CDK app and `datasets`, always to one value.
_OF_IMPORTS: Final = (b"TORCHINDUCTOR_CACHE_DIR", b"JSII_SILENCE_WARNING_", b"KMP_")
_SIGNALS: Final = [int(each) for each in signal.Signals if each not in {9, 19}]
_LOGGERS: Final = [
    logging.getLogger(name) for name in ("root", "tidemill", "asyncio", "boto3", "botocore")
]
# Pools of the process: the first use starts them, and they never end.
_POOLS: Final = ("tidemill-kernels-", "tidemill-grammars")
# The process's timer of heap trims; threads of a test's HTTP server, each of which ends with a
# connection that the client closes; asyncio's, which ends with a process that a fixture ends; and
# those of tqdm's bars and of the CDK.
_ENDLESS: Final = (
    *_POOLS,
    "tidemill-trim",
    *("(process_request_thread)", "asyncio-waitpid-", "TMonitor", "process.stderr_sink"),
)
# Time for a thread to notice that its test is over, on a machine busy with others.
_ENDING_SECONDS: Final = 20.0
_LOOK_SECONDS: Final = 0.05
_POOL_WORKER: Final = concurrent.futures.thread._worker.__code__  # type: ignore[attr-defined]

_KEYS_OF_INVOCATION: Final = {
    "cold_start",
    "correlation_id",
    "function_arn",
    "function_memory_size",
    "function_name",
    "function_request_id",
}

_MISSING: Final = object()


def _attribute(path: str) -> Callable[[Any], object]:
    def read(module: Any) -> object:
        value = module
        for name in path.split("."):
            value = getattr(value, name)
        return value

    return read


# The singletons of each module that tests have reason to change.
_SINGLETONS: Final[Mapping[str, tuple[tuple[str, Callable[[Any], object]], ...]]] = {
    "tidemill.handler.deployment": (
        ("deployment()", lambda module: module.deployment.cache_info().currsize),
    ),
    "tidemill.handler.observability": (("logger.log_level", _attribute("logger.log_level")),),
    "huggingface_hub.constants": (
        ("HF_HUB_OFFLINE", _attribute("HF_HUB_OFFLINE")),
        ("HF_HUB_CACHE", _attribute("HF_HUB_CACHE")),
    ),
    "torch": (
        ("get_default_dtype()", lambda torch: torch.get_default_dtype()),
        ("is_grad_enabled()", lambda torch: torch.is_grad_enabled()),
        ("is_inference_mode_enabled()", lambda torch: torch.is_inference_mode_enabled()),
        ("get_num_threads()", lambda torch: torch.get_num_threads()),
        (
            "are_deterministic_algorithms_enabled()",
            lambda torch: torch.are_deterministic_algorithms_enabled(),
        ),
    ),
    # Libraries own their context variables: torch's compiler and notebooks leave some set.
    "tidemill.engine.structured_output.verify": (
        ("_until", lambda verify: verify._until.get(None)),
    ),
    "tidemill.engine.kernels.backends": (
        ("_IS_REFERENCE", lambda backends: backends._IS_REFERENCE.get()),
    ),
    "numba": (("get_num_threads()", lambda numba: numba.get_num_threads()),),
}


class ProcessState:
    """State of the process at creation; `changes` lists later changes."""

    def __init__(self) -> None:
        self._environment = _environment()
        self._folder = os.getcwd()  # noqa: PTH109 - a Path costs more than the rest
        self._handlers = [_signal.getsignal(number) for number in _SIGNALS]
        self._values = _values()
        self._singletons = _singletons()
        self._threads = set(threading.enumerate())

    def changes(self) -> list[str]:
        """Return the changes, one per line, and restore what can be restored."""
        found = [*self._changed_environment(), *self._changed_folder(), *self._changed_signals()]
        found += _difference(self._values, _values())
        # A module that was imported later has no earlier value.
        now = {name: value for name, value in _singletons().items() if name in self._singletons}
        found += _difference(self._singletons, now)
        _forget_invocation()
        return [*found, *self._new_threads()]

    def _changed_environment(self) -> list[str]:
        now = _environment()
        if now == self._environment:
            return []
        names = sorted(
            name
            for name in self._environment.keys() | now.keys()
            if self._environment.get(name) != now.get(name)
            and not (name not in self._environment and name.startswith(_OF_IMPORTS))
        )
        for name in names:
            if name in self._environment:
                os.environb[name] = self._environment[name]
            else:
                del os.environb[name]
        return [f"the environment variable {name.decode()}" for name in names]

    def _changed_folder(self) -> list[str]:
        now = _MISSING
        with suppress(FileNotFoundError):  # a working folder that was deleted
            now = os.getcwd()  # noqa: PTH109 - as above
        if now == self._folder:
            return []
        os.chdir(self._folder)
        return [f"the working folder: {self._folder}"]

    def _changed_signals(self) -> list[str]:
        found = []
        for number, before in zip(_SIGNALS, self._handlers, strict=True):
            if (now := _signal.getsignal(number)) != before:
                found.append(f"the handler of {signal.Signals(number).name}: {now!r}")
                if before is not None:
                    signal.signal(number, before)
        return found

    def _new_threads(self) -> list[str]:
        until = time.monotonic() + _ENDING_SECONDS
        found = []
        for thread in threading.enumerate():
            if thread in self._threads or any(name in repr(thread) for name in _ENDLESS):
                continue
            # Read once: an idle worker that begins to end is over, too.
            while not (is_over := _is_over(thread)) and time.monotonic() < until:
                thread.join(_LOOK_SECONDS)
            if not is_over:
                found.append(f"the thread {thread!r} is alive")
        return found


def _is_over(thread: threading.Thread) -> bool:
    """Say whether a thread has ended or is an idle worker of a pool, which ends with the pool."""
    if not thread.is_alive():
        return True
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is _POOL_WORKER


def _forget_invocation() -> None:
    """Forget the state that libraries keep after a Lambda's last invocation.

    Powertools' logger retains the keys of the invocation, boto3's default session the environment's
    credentials.
    """
    if module := sys.modules.get("tidemill.handler.observability"):
        keys = module.logger.registered_formatter.log_format
        for name in _KEYS_OF_INVOCATION & keys.keys():
            del keys[name]
    if (module := sys.modules.get("boto3")) and module.DEFAULT_SESSION is not None:
        module.DEFAULT_SESSION._session._credentials = None


def _environment() -> dict[bytes, bytes]:
    """Return the environment; a copy of `os.environ` would decode every variable."""
    found: dict[bytes, bytes] = os.environ._data.copy()  # type: ignore[attr-defined]
    found.pop(_PHASE, None)
    return found


def _values() -> dict[str, object]:
    return {
        "sys.path": sys.path[:],
        "sys.argv": sys.argv[:],
        "sys.stdin": sys.stdin,
        "sys.excepthook": sys.excepthook,
        "sys.getrecursionlimit()": sys.getrecursionlimit(),
        "sys.get_int_max_str_digits()": sys.get_int_max_str_digits(),
        "threading.excepthook": threading.excepthook,
        "socket.getdefaulttimeout()": socket.getdefaulttimeout(),
        "tempfile.gettempdir()": tempfile.gettempdir(),
        "gc.isenabled()": gc.isenabled(),
        "the locale": _locale.setlocale(_locale.LC_ALL, None),
        "asyncio's event loop policy": type(asyncio.events._event_loop_policy),  # type: ignore[attr-defined]
        "logging.disable()": logging.root.manager.disable,
        **{
            f"the logger {logger.name}": (
                logger.level,
                logger.handlers[:],
                logger.propagate,
                logger.disabled,
            )
            for logger in _LOGGERS
        },
    }


def _singletons() -> dict[str, object]:
    found = {}
    for module_name, singletons in _SINGLETONS.items():
        module = sys.modules.get(module_name)
        if module is None:
            continue
        with suppress(AttributeError):  # while it is being imported
            for name, read in singletons:
                found[f"{module_name}.{name}"] = read(module)
    return found


def _difference(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    if before == now:
        return []
    return [
        f"{name}: {before.get(name)!r} became {now.get(name)!r}"
        for name in before.keys() | now.keys()
        if before.get(name, _MISSING) != now.get(name, _MISSING)
    ]
