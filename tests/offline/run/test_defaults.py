"""Defaults of a run: `--temperature`, `--max-tokens`, `--system-prompt`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.offline.given import CHAT, HI, line, rows
from tidemill.offline.arguments.defaults import Defaults
from tidemill.offline.console.errors import BadInput

Write = Callable[..., Path]
ALL = Defaults(temperature=0.5, max_tokens=9, system_prompt="Be brief.")
FLAGS = ["--temperature", "0.5", "--max-tokens", "9", "--system-prompt", "Be brief."]
RESPONSES = "/v1/responses"
LIMITED = {"temperature": 0.5, "max_output_tokens": 9}
BRIEFLY = {"temperature": 0.5, "instructions": "Be brief."}
BRIEF = {"role": "system", "content": "Be brief."}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return the path of the output."""
    return tmp_path / "out.jsonl"


def request(custom_id: str, url: str, **body: Any) -> str:
    """Return a line to any url."""
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def bodies_of(run: Any) -> list[dict[str, Any]]:
    """Record the request bodies that the engine of a run receives."""
    bodies: list[dict[str, Any]] = []
    load = run._load

    def recording(*arguments: Any, **given: Any) -> Any:
        engine = load(*arguments, **given)
        respond = engine.respond

        async def answer(url: str, body: dict[str, Any], *rest: Any) -> Any:
            bodies.append(body)
            return await respond(url, body, *rest)

        engine.respond = answer
        return engine

    run._load = recording
    return bodies


@pytest.mark.parametrize(
    ("url", "body", "applied"),
    [
        (CHAT, {}, {"temperature": 0.5, "max_tokens": 9}),
        (CHAT, {"messages": HI}, {"temperature": 0.5, "max_tokens": 9, "messages": [BRIEF, *HI]}),
        (CHAT, {"temperature": 0, "max_tokens": 1}, {"temperature": 0, "max_tokens": 1}),
        (CHAT, {"temperature": None, "max_tokens": None}, {"temperature": 0.5, "max_tokens": 9}),
        (CHAT, {"max_completion_tokens": 3}, {"temperature": 0.5, "max_completion_tokens": 3}),
        (CHAT, {"messages": "x"}, {"temperature": 0.5, "max_tokens": 9, "messages": "x"}),
        ("/v1/completions", {"prompt": "x"}, {"prompt": "x", "temperature": 0.5, "max_tokens": 9}),
        ("/v1/audio/transcriptions", {}, {"temperature": 0.5}),
        ("/v1/embeddings", {"input": "x"}, {"input": "x"}),
        (
            RESPONSES,
            {"input": "x"},
            {"input": "x", **LIMITED, **BRIEFLY},
        ),
        (RESPONSES, {"max_output_tokens": 1}, {**BRIEFLY, "max_output_tokens": 1}),
        (RESPONSES, {"input": [BRIEF]}, {"input": [BRIEF], **LIMITED}),
        (CHAT, {"input": "x"}, {"input": "x", "temperature": 0.5, "max_tokens": 9}),
        ("/v1/unknown", {"input": "x"}, {"input": "x"}),
    ],
)
def test_a_default_holds_where_a_line_says_nothing(
    url: str, body: dict[str, Any], applied: dict[str, Any]
) -> None:
    """It applies only to URLs with that parameter and does not change the line's body."""
    before = json.dumps(body)
    assert ALL.apply(url, body) == applied
    assert json.dumps(body) == before


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_of_a_line_win(role: str) -> None:
    """Wherever in the conversation they stand."""
    messages = [*HI, {"role": role, "content": "Be long."}]
    assert Defaults(system_prompt="x").apply(CHAT, {"messages": messages})["messages"] == messages


def test_the_engine_receives_the_defaults(run: Any, write_input: Write, out: Path) -> None:
    """The row refers to the line as it is in the file."""
    bodies = bodies_of(run)
    source = write_input(line("a"), line("b", temperature=1.5))
    assert run(source, "-o", out, *FLAGS) == 0
    assert [body["temperature"] for body in bodies] == [0.5, 1.5]
    assert [body["max_tokens"] for body in bodies] == [9, 9]
    assert bodies[0]["messages"] == [BRIEF, *HI]


def test_resumed_and_retried_lines_have_the_defaults(
    run: Any, write_input: Write, out: Path
) -> None:
    """The kept rows are recognised, whatever was added to their bodies."""
    source = write_input(line("a"), line("b", name="b"), line("c"))
    run.fails_at = {"b"}
    assert run(source, "-o", out, *FLAGS) == 0
    whole = out.read_bytes()
    out.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    bodies = bodies_of(run)
    assert run(source, "-o", out, *FLAGS, "--resume") == 0
    assert [body["max_tokens"] for body in bodies] == [9]
    assert out.read_bytes() == whole
    run.fails_at = set()
    assert run(source, "-o", out, *FLAGS, "--resume", "--retry-failed") == 0
    assert [body["max_tokens"] for body in bodies] == [9, 9]
    assert [row["response"]["status_code"] for row in rows(out)] == [200] * 3


def test_lines_that_a_default_is_not_for_are_left_alone_with_a_warning(
    run: Any, write_input: Write, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file may mix urls."""
    source = write_input(line("a"), request("b", "/v1/completions", prompt="x"))
    assert run(source, "-o", out, "--system-prompt", "x") == 0
    assert (
        "warning: --system-prompt has no effect on 1 of 2 lines, whose URL has no such parameter\n"
    ) in capsys.readouterr().err


def test_a_default_for_no_line_is_refused(run: Any, write_input: Write, out: Path) -> None:
    """Otherwise it would silently have no effect."""
    source = write_input(*(request(str(n), "/v1/embeddings", input="x") for n in range(3)))
    with pytest.raises(
        BadInput, match=r"--temperature has no effect on any line of .*, whose URLs have"
    ):
        run(source, "-o", out, "--temperature", "0")
    assert not out.exists()
