"""Compilation runs in separate threads; one that does not end delays no other."""

from __future__ import annotations

import threading

import pytest
from llguidance import LLMatcher, LLTokenizer

from tidemill.engine.structured_output import compiler as module
from tidemill.engine.structured_output.compiler import Compiler

TOKENS = LLTokenizer("byte")


def test_a_compilation_that_takes_too_long_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another thread replaces its thread, which ends with it."""
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
    compiled = compiler.run(lambda: LLMatcher(TOKENS, "start: /b/", log_level=0))
    assert compiled.matcher.validate_tokens([98]) == 1
    assert compiled.seconds > 0
    go_on.set()
    worker[0].join(120)
    assert not worker[0].is_alive()


def test_an_exception_is_raised_in_the_caller() -> None:
    """Its thread continues with the next compilation."""
    compiler = Compiler(1, max_seconds=10)

    def fail() -> LLMatcher:
        raise MemoryError

    with pytest.raises(MemoryError):
        compiler.run(fail)
    assert not compiler.run(lambda: LLMatcher(TOKENS, "start: /b/", log_level=0)).matcher.is_error()
