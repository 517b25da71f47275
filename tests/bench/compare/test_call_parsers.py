"""The comparison of parsers with vLLM's lists only the differences."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.compare.call_parsers import main, value_of
from tests.engine.parsers.transcripts import load_transcripts


def test_only_answers_that_differ_are_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script stands in for vLLM's environment: it errs in one text and one stream."""
    answers = [
        {
            "reasoning": each.reasoning,
            "content": each.content + "\n",
            "calls": [[name, value_of(arguments)] for name, arguments in each.calls],
        }
        for each in load_transcripts("pythonic")
    ]
    pairs: list[list[object]] = [[answer, answer] for answer in answers]
    pairs[0][0] = answers[0] | {"content": "a | b"}
    pairs[1][1] = {"error": "ValueError: x"}
    python = tmp_path / "python"
    (tmp_path / "answers").write_text(json.dumps(pairs))
    python.write_text(f"#!/bin/sh\ncat > /dev/null\necho loading\ncat {tmp_path}/answers\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["x", "--vllm-python", str(python), "--formats", "pythonic"])
    main()
    _, _, text, stream, _, total = capsys.readouterr().out.splitlines()
    assert text == '| pythonic: plain | whole | `{"content": ""}` | `{"content": "a \\| b"}` |'
    assert stream.startswith("| pythonic: two calls | streamed | ")
    assert "ValueError: x" in stream
    assert total == f"{2 * len(pairs) - 2} of {2 * len(pairs)} are equal."
