"""Grammar compiler: llguidance grammars to matchers, with limits on size, time and stack.

llguidance recurses as deeply as a grammar, and a stack overflow ends the process. So grammars have
limits, and are compiled in threads with a stack for many times these limits. Compilation releases
the GIL.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from queue import SimpleQueue
from typing import NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_logger = logging.getLogger(__name__)

# Chains of 5,000 rules or references have exceeded 8 MiB; the limits are 1,000 rules, and schemas
# of up to 1,000 references with 50 others around each. Unused stack takes no memory.
_STACK_BYTES = 512 * 2**20
# Fuel limits the cost of building a lexer: with a million some took a second and 200 MB.
_LIMITS = LLParserLimits(
    verbose_errors=False,
    initial_lexer_fuel=250_000,
    max_lexer_states=50_000,
)
# CPU time. `protocol.automata` rejects grammars that are known to take longer than a second or two;
# this limit applies to all others.
MAX_SECONDS = 10.0
_NUM_THREADS = 4
_LOOK_SECONDS = 0.5
MAX_REGEX_CHARS = 10_000
MAX_RULES = 1_000
_RULE = re.compile(r"^[ \t]*[?!]?[A-Za-z_][\w.-]*(?:\[[^\]\n]*\])?\s*:", re.MULTILINE)


class Compiled(NamedTuple):
    """A grammar's matcher, and the CPU seconds that compiling it took."""

    matcher: LLMatcher
    seconds: float


def compiled(tokens: LLTokenizer, grammar: str) -> Compiled:
    """Return the matcher of a grammar, which contains the error if the grammar is invalid.

    Raises TimeoutError for a grammar that takes more than `MAX_SECONDS` of CPU time.
    """
    return _compiler().run(lambda: LLMatcher(tokens, grammar, log_level=0, limits=_LIMITS))


def check_lark(source: str) -> None:
    """Raise ValueError for a grammar with too many rules, or with a rule that is too long."""
    starts = [match.start() for match in _RULE.finditer(source)]
    if len(starts) > MAX_RULES:
        raise ValueError(f"it has {len(starts):,} rules; the maximum is {MAX_RULES:,}")
    longest = max(
        stop - start for start, stop in zip([0, *starts], [*starts, len(source)], strict=True)
    )
    if longest > MAX_REGEX_CHARS:
        raise ValueError(f"a rule has {longest:,} characters; the maximum is {MAX_REGEX_CHARS:,}")


def check_regex(source: str) -> None:
    """Raise ValueError for an expression that is too long: its cost grows with the square."""
    if len(source) > MAX_REGEX_CHARS:
        raise ValueError(f"it has {len(source):,} characters; the maximum is {MAX_REGEX_CHARS:,}")


class Compiler:
    """Threads that compile, each with a deep stack.

    A compilation cannot be cancelled: the thread of one that takes too long is abandoned and
    replaced.
    """

    def __init__(self, num_threads: int, max_seconds: float) -> None:
        self._max_seconds = max_seconds
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        for _ in range(num_threads):
            self._start()

    def run(self, compile_: Callable[[], LLMatcher]) -> Compiled:
        """Return the compiled grammar; raise TimeoutError if that takes too long."""
        job = _Job(compile_)
        self._jobs.put(job)
        while True:
            try:
                return job.outcome.result(_LOOK_SECONDS)
            except TimeoutError:
                if job.seconds() > self._max_seconds:
                    break
        job.is_left = True
        _logger.warning("a grammar is rejected: it has not compiled within %g s", self._max_seconds)
        self._start()
        raise TimeoutError

    def _start(self) -> None:
        with _STACK_LOCK:
            before = threading.stack_size(_STACK_BYTES)
            try:
                threading.Thread(target=self._work, name="tidemill-grammars", daemon=True).start()
            finally:
                threading.stack_size(before)

    def _work(self) -> None:
        job = self._jobs.get()
        job.run()
        while not job.is_left:
            job = self._jobs.get()
            job.run()


class _Job:
    """One compilation; `is_left` once no caller waits for it."""

    def __init__(self, compile_: Callable[[], LLMatcher]) -> None:
        self._compile = compile_
        self._clock = time.CLOCK_MONOTONIC  # if other threads cannot read a thread's CPU clock
        self._start: float | None = None
        self.outcome: Future[Compiled] = Future()
        self.is_left = False

    def run(self) -> None:
        """Compile, in the thread whose CPU time counts."""
        if sys.platform == "linux":
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._start = time.clock_gettime(self._clock)
        try:
            matcher = self._compile()
            self.outcome.set_result(Compiled(matcher, self.seconds()))
        except BaseException as exc:  # noqa: BLE001 - raised again by `outcome.result`
            self.outcome.set_exception(exc)

    def seconds(self) -> float:
        """Return the CPU time so far."""
        return 0.0 if self._start is None else time.clock_gettime(self._clock) - self._start


_STACK_LOCK = threading.Lock()


@cache
def _compiler() -> Compiler:
    """Return the compiler of this process."""
    return Compiler(_NUM_THREADS, MAX_SECONDS)
