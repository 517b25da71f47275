"""Transcripts of each format are parsed as whole texts, by characters and by tokens."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.engine.parsers.transcripts import FORMATS, TOOLS, Transcript, load_transcripts
from tidemill import demo
from tidemill.engine.parsers.output_parser import ModelOutputParser
from tidemill.engine.parsers.parsed_output import (
    DeltaMessage,
    ParsedMessage,
    merge_deltas,
    parse_text,
)
from tidemill.engine.parsers.registry import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    select_parsers,
)
from tidemill.engine.parsers.tool_calls import INCOMPLETE, UNREAD

TRANSCRIPTS = [each for name in FORMATS for each in load_transcripts(name)]
TOKENIZER = Tokenizer.from_file(str(demo.MODEL_PATH / "tokenizer.json"))


def parser_of(transcript: Transcript) -> ModelOutputParser:
    """Return the parser of a transcript's format."""
    parsers = select_parsers(
        None, tool_calls=transcript.tool_call_parser, reasoning=transcript.reasoning_parser
    )
    is_open = transcript.reasoning_parser == "deepseek_r1"
    return ModelOutputParser(parsers, "req_1", is_open=is_open, tools=TOOLS)


def streamed(parser: ModelOutputParser, pieces: list[str]) -> list[DeltaMessage]:
    """Return the deltas of a text in pieces."""
    reader = parser.for_choice(0)
    return [*(delta for piece in pieces for delta in reader.push(piece)), *reader.end()]


def typed(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    """Return calls with the values of their arguments; incomplete ones stay text."""
    result: list[tuple[str, Any]] = []
    for name, arguments in calls:
        try:
            result.append((name, json.loads(arguments)))
        except ValueError:
            result.append((name, arguments))
    return result


def summary(answer: ParsedMessage) -> tuple[object, ...]:
    """Return an answer without its call IDs."""
    calls = [(call.name, call.arguments) for call in answer.calls]
    return answer.reasoning, answer.content, typed(calls)


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=str)
def test_a_transcript_has_its_reasoning_content_and_calls(transcript: Transcript) -> None:
    """The pieces that arrive do not matter: the whole text, tokens or characters."""
    parser = parser_of(transcript)
    whole = parse_text(parser.for_choice(0), transcript.text)
    expected = transcript.reasoning, transcript.content, typed(transcript.calls)
    assert summary(whole) == expected
    is_cut = transcript.case == "truncated"
    assert whole.warnings == ((INCOMPLETE if transcript.calls else UNREAD,) if is_cut else ())
    starts = {start for start, _ in TOKENIZER.encode(transcript.text).offsets}
    bounds = sorted({0, *starts, len(transcript.text)})
    tokens = [transcript.text[start:end] for start, end in pairwise(bounds)]
    for pieces in (tokens, list(transcript.text)):
        parts = merge_deltas(streamed(parser, pieces))
        assert (parts.calls, summary(parts), parts.warnings) == (
            whole.calls,
            expected,
            whole.warnings,
        )


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_stream_as_they_are_written(name: str) -> None:
    """The name comes first; each character of a string follows as soon as it is written."""
    [cut] = [each for each in load_transcripts(name) if each.case == "truncated"]
    reader = parser_of(cut).for_choice(0)
    deltas = [delta for char in cut.text for delta in reader.push(char)]
    [[first], *rest] = [delta.calls for delta in deltas if delta.calls]
    assert (first.name, first.call_id is not None) == ("note", True)
    assert "".join(call.arguments for calls in ((first,), *rest) for call in calls).endswith("upon")
    assert len(rest) > len("upon")


def test_each_format_has_transcripts() -> None:
    """A parser without a file would be compared with nothing."""
    calls = {TOOL_CALL_PARSERS[each.tool_call_parser] for each in TRANSCRIPTS}
    assert calls == {*TOOL_CALL_PARSERS.values()}
    names = {each.reasoning_parser for each in TRANSCRIPTS if each.reasoning}
    reasoning = {parser_for for name, parser_for in REASONING_PARSERS.items() if name in names}
    assert reasoning == {*REASONING_PARSERS.values()}
