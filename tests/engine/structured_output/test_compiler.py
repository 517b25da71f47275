"""Compilation: threads of its own, in which one that does not end holds nobody else up."""

from __future__ import annotations

import threading

import pytest
from llguidance import LLMatcher, LLTokenizer

from tidemill.engine.structured_output import compiler as module
from tidemill.engine.structured_output.compiler import Compiler

TOKENS = LLTokenizer("byte")


def test_one_that_takes_too_long_is_left_to_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another thread takes the place of its own, which ends with it."""
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.5)
    compiler = Compiler(1, max_seconds=0.0)
    go_on, worker = threading.Event(), list[threading.Thread]()

    def endless() -> LLMatcher:
        worker.append(threading.current_thread())
        go_on.wait(120)
        return LLMatcher(TOKENS, "start: /a/", log_level=0)

    with pytest.raises(TimeoutError):
        compiler.run(endless)
    assert "has not compiled within" in caplog.text
    made = compiler.run(lambda: LLMatcher(TOKENS, "start: /b/", log_level=0))
    assert made.matcher.validate_tokens([98]) == 1
    assert made.seconds > 0
    go_on.set()
    worker[0].join(120)
    assert not worker[0].is_alive()


def test_what_it_raises_is_raised_where_it_was_asked_for() -> None:
    """And its thread goes on with the next."""
    compiler = Compiler(1, max_seconds=10)

    def fail() -> LLMatcher:
        raise MemoryError

    with pytest.raises(MemoryError):
        compiler.run(fail)
    assert not compiler.run(lambda: LLMatcher(TOKENS, "start: /b/", log_level=0)).matcher.is_error()
