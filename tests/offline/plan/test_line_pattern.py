"""Line patterns: lines that differ in their IDs and prompts are checked without being parsed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tidemill.batch.file.lines import LineError, RawLine, parse_fields
from tidemill.offline.arguments.defaults import Defaults
from tidemill.offline.files import input_check
from tidemill.offline.files.input_check import InputReport, check_lines
from tidemill.offline.files.input_file import InputFile
from tidemill.offline.files.source import open_source
from tidemill.offline.plan.body_form import BodyForms
from tidemill.offline.plan.line_index import LineIndex, describe
from tidemill.offline.plan.line_pattern import LinePattern, find_pattern

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DEFAULTS = Defaults(max_tokens=8, system_prompt='Say "no" at 100%.')


def line(custom_id: str, text: str, **fields: Any) -> dict[str, Any]:
    """Return the line of a chat."""
    messages = [{"role": "system", "content": "100%"}, {"role": "user", "content": text}]
    body = {"model": "m", "messages": messages, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body | fields}


def prompt(custom_id: str, text: str, **fields: Any) -> dict[str, Any]:
    """Return the line of a completion, with its ID at the end."""
    return {"url": COMPLETIONS, "body": {"prompt": text, **fields}, "custom_id": custom_id}


def printed(value: Any, *, is_ascii: bool = False) -> bytes:
    """Return a line without its newline."""
    return json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")


def pattern_of(first: Any, second: Any, defaults: Defaults = DEFAULTS) -> LinePattern | None:
    """Return the pattern of two lines that were checked before."""
    forms, found = BodyForms(["m"]), []
    for one in (first, second):
        body = defaults.apply(one["url"], one["body"])
        form = forms.form_of(one["url"], body)
        forms.check(one["url"], body, form)
        found.append(form)
    assert found[0] is found[1]
    return find_pattern(printed(second), printed(first), found[0], defaults.apply)


@pytest.mark.parametrize("make", [line, prompt])
@pytest.mark.parametrize("defaults", [DEFAULTS, Defaults()])
def test_a_match_equals_parsing(make: Any, defaults: Defaults) -> None:
    """Texts of any characters, and damaged lines, give the parsed ID and prompt, or no match."""
    pattern = pattern_of(make("1", "one"), make("2", "two"), defaults)
    assert pattern is not None
    chooser, num_matches = random.Random(0), 0
    pieces = ["a", "é", "\n", '"', "\\", "\t", "\x01", "\x7f", "\u2028", "😀", "/", "\\n", "%b"]
    pieces += ["@0", '"}, {"role": "user", "content": "', '", "method"', "\ud800", "\r\b"]
    for number in range(1_500):
        texts = ["".join(chooser.choices(pieces, k=chooser.randrange(5))) for _ in range(2)]
        custom_id = f"{number}{texts[0] * (number % 4 == 0)}"
        data = printed(make(custom_id, texts[1]), is_ascii=number % 5 == 0)
        if number % 3 == 0:  # damage
            place = chooser.randrange(len(data))
            data = data[:place] + chooser.choice([b"", b'"', b"\\", b"\n", b"\xff"]) + data[place:]
        match = pattern.match(data)
        if match is None:
            continue
        num_matches += 1
        fields = parse_fields(RawLine(1, data))
        body = defaults.apply(fields["url"], fields["body"])
        assert match[0] == fields["custom_id"].encode()
        key, max_tokens, body_hash = describe(body, pattern.form)
        assert (match[1], pattern.max_tokens, pattern.form.hash_of(match[1])) == (
            key,
            max_tokens,
            body_hash,
        )
    assert num_matches > 300
    for text in ("plain", 'say "no"\n\tor \\ this\r', "😀 é"):
        assert pattern.match(printed(make("any", text))) is not None


@pytest.mark.parametrize(
    "other",
    [
        b'{"custom_id": "\\n", %b',
        b'{"custom_id": "a\x01", %b',
        b'{"custom_id": "\xff", %b',
        b'{"custom_id": "a"b", %b',
    ],
)
def test_an_id_that_is_not_plain_is_parsed(other: bytes) -> None:
    """Escapes, control characters, quotes and bytes that are not UTF-8 give no match."""
    pattern = pattern_of(line("1", "one"), line("2", "two"))
    assert pattern is not None
    rest = printed(line("1", "one")).partition(b'"custom_id": "1", ')[2]
    assert pattern.match(b'{"custom_id": "1", %b' % rest) is not None
    assert pattern.match(other % rest) is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (line("1", "a"), line("2", "b", seed=2)),
        (line("1", "a", stop=["x"]), line("2", "b", stop=["x"]) | {"note": "\u00e9"}),
        (line("1", "a") | {"note": "x"}, line("2", "b") | {"note": "y"}),
        (line("1", "a") | {"note": 1}, line("2", "b") | {"hint": 1}),
        (line("1", "a"), dict(reversed(line("2", "b").items()))),
        (line("1", "a"), line("1", "b")),
        (line("1", "a"), line("2", "b" * 2**16)),
        (line("1", "a"), {**line("2", "b"), "custom_id": "\u2028\ud83d"}),
    ],
)
def test_lines_that_differ_elsewhere_have_no_pattern(first: Any, second: Any) -> None:
    """Only IDs and texts of prompts may differ."""
    forms = BodyForms(["m"])
    form = forms.form_of(CHAT, second["body"])
    forms.check(CHAT, second["body"], form)
    is_ascii = "\ud83d" in second["custom_id"]
    data = printed(second, is_ascii=is_ascii)
    assert find_pattern(data, printed(first), form, Defaults().apply) is None


def test_roles_are_not_gaps() -> None:
    """A text is valid for each role that a pattern has, not for others."""
    forms = BodyForms(["m"])
    first, second = line("1", "a"), line("2", "b")
    first["body"]["messages"][1]["role"] = "developer"
    for one in (first, second):
        forms.check(CHAT, one["body"], forms.form_of(CHAT, one["body"]))
    form = forms.form_of(CHAT, second["body"])
    assert find_pattern(printed(second), printed(first), form, Defaults().apply) is None


def test_an_empty_prompt_is_parsed() -> None:
    """The text of a message may be empty, a prompt may not."""
    for make, matches in ((line, True), (prompt, False)):
        pattern = pattern_of(make("1", "one"), make("2", "two"))
        assert pattern is not None
        assert (pattern.match(printed(make("3", ""))) is not None) is matches


@pytest.fixture
def num_parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of the lines that a check has parsed."""
    numbers: list[int] = []

    def parse(raw: RawLine) -> dict[str, Any]:
        numbers.append(raw.number)
        return parse_fields(raw)

    monkeypatch.setattr(input_check, "parse_fields", parse)
    return numbers


def lines_of_a_file() -> Iterator[bytes]:
    """Yield the lines of a file with three kinds of requests, repeated IDs and bad lines."""
    for number in range(300):
        text = f'Question {number % 50}: "é"\n'
        yield printed(line(str(number % 290), text))
        if number % 60 == 7:
            yield printed(line(f"x{number}", text, modle="m"))
            yield printed(line(f"y{number}", text, model="other"))
            yield printed(prompt(f"z{number}", ""))
            yield b'{"custom_id": "1", \xff}'
    for number in range(300):
        yield printed(prompt(f"p{number}", f"Question {number}", max_tokens=2))


def checked(path: Path, defaults: Defaults) -> tuple[InputReport, bytes, list[bytes]]:
    """Return the report of a file, and the records and prompts of its index."""
    opened = open_source(str(path), tmp_dir=None, delays=())
    with opened as source, closing(LineIndex()) as index:
        requests = InputFile.from_source(source, 2**20)
        report = check_lines(requests, ["m"], defaults=defaults, tmp_dir=None, index=index)
        records = index.records
        lengths = records["prompt_bytes"].astype("i8")
        keys = [*index.keys(lengths.cumsum() - lengths, lengths)]
        return report, records.tobytes(), keys


@pytest.mark.parametrize("defaults", [Defaults(), Defaults(temperature=0.5, max_tokens=4)])
def test_a_file_is_checked_as_if_each_line_were_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_parsed: list[int], defaults: Defaults
) -> None:
    """Reports, repeated IDs and the index are the same; few lines are parsed."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(b"%b\n" % data for data in lines_of_a_file()))
    report, records, keys = checked(path, defaults)
    assert len(num_parsed) < 0.3 * report.num_rows
    monkeypatch.setattr(input_check, "find_pattern", lambda *_: None)
    num_parsed.clear()
    other, other_records, other_keys = checked(path, defaults)
    assert len(num_parsed) == report.num_rows == other.num_rows
    assert (records, keys) == (other_records, other_keys)
    for name in InputReport.__dataclass_fields__:
        if name not in {"requests", "malformed", "failing"}:
            assert getattr(report, name) == getattr(other, name), name
    for summary, expected in ((report.malformed, other.malformed), (report.failing, other.failing)):
        assert [*summary.sentences()] == [*expected.sentences()]


def test_a_flag_without_effect_is_counted_for_each_line(
    tmp_path: Path, num_parsed: list[int]
) -> None:
    """Lines of such an endpoint are parsed."""
    path = tmp_path / "in.jsonl"
    url = "/v1/embeddings"
    each = [{"custom_id": str(n), "url": url, "body": {"input": f"text {n}"}} for n in range(9)]
    path.write_bytes(b"".join(b"%b\n" % printed(one) for one in each))
    report, _, _ = checked(path, Defaults(temperature=0))
    assert report.without_effect == {"--temperature": 9}
    assert len(num_parsed) == 9
    num_parsed.clear()
    checked(path, Defaults())
    assert len(num_parsed) == 2


def test_searches_for_a_pattern_become_rare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose lines have no pattern costs few searches."""
    path = tmp_path / "in.jsonl"
    each = [line(str(number), "a") | {"note": str(number)} for number in range(200)]
    path.write_bytes(b"".join(b"%b\n" % printed(one) for one in each))
    searches: list[bytes] = []
    monkeypatch.setattr(input_check, "find_pattern", lambda data, *_: searches.append(data))
    checked(path, Defaults())
    assert len(searches) == 7


def test_a_line_with_an_escape_of_another_form_is_valid(tmp_path: Path) -> None:
    r"""The key of a prompt with `\u00e9` equals that of one with `é`."""
    path = tmp_path / "in.jsonl"
    each = [printed(line(str(n), "é" * (n % 2)), is_ascii=n > 4) for n in range(9)]
    path.write_bytes(b"".join(b"%b\n" % data for data in each))
    _, _, keys = checked(path, Defaults())
    assert len({*keys}) == 2


def test_a_malformed_line_that_is_almost_a_match_is_an_error() -> None:
    """The pattern leaves it to the parser, which rejects it."""
    pattern = pattern_of(line("1", "one"), line("2", "two"))
    assert pattern is not None
    data = printed(line("3", "a@b"))
    for fault in (b"\\x", b"\n", b"\xff", b'"'):
        broken = data.replace(b"@", fault)
        assert pattern.match(broken) is None
        with pytest.raises(LineError):
            parse_fields(RawLine(1, broken))
