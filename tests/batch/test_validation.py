"""Errors of a file's lines, and of a file as a whole."""

from __future__ import annotations

import json
from itertools import cycle
from typing import Any

import pytest

from tidemill.batch.allowed_media import AllowedMedia
from tidemill.batch.file.duplicate_ids import Duplicate, Duplicates
from tidemill.batch.file.expected_tokens import ExpectedTokens
from tidemill.batch.file.lines import RawLine
from tidemill.batch.model import BatchError, OnInvalidLine
from tidemill.batch.validation import (
    Findings,
    LineChecker,
    Verdict,
    _route_of_short,
    judge,
)

NO_DUPLICATES = Duplicates(0, ())
CHAT = "/v1/chat/completions"


def request(**changes: Any) -> dict[str, Any]:
    """Return a valid request for model `m`; a change to None removes the field."""
    fields = {"custom_id": "c", "method": "POST", "url": CHAT, "body": {"model": "m"}} | changes
    return {name: value for name, value in fields.items() if value is not None}


def check(
    *lines: dict[str, Any] | bytes,
    models: tuple[str, ...] = ("m",),
    aliases: dict[str, str] | None = None,
    endpoint: str | None = None,
    media: AllowedMedia | None = None,
) -> Findings:
    """Return the findings for these lines."""
    findings = Findings()
    named = {**(aliases or {}), **{model: model for model in models}}
    checker = LineChecker(
        findings, models=named, endpoint=endpoint, add_id=lambda _id, _line: None, media=media
    )
    for number, line in enumerate(lines, start=1):
        data = line if isinstance(line, bytes) else json.dumps(line).encode()
        checker.check(RawLine(number, data))
    return findings


def codes(findings: Findings) -> list[str]:
    """Return the codes of the errors."""
    return [error.code for error in findings.errors]


def test_valid_lines_are_counted_and_set_the_model_and_endpoint() -> None:
    """Model and endpoint come from the first line; other endpoints may follow."""
    findings = check(request(url="/chat/completions"), request(url="/v1/completions"))
    expected = ExpectedTokens(input=43, output=1_024)
    assert findings == Findings(num_rows=2, model="m", endpoint=CHAT, expected=expected)


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (request(custom_id=None), "missing_required_parameter", "custom_id"),
        (request(custom_id=5), "missing_required_parameter", "custom_id"),
        (request(body=None), "missing_required_parameter", "body"),
        (request(url=None), "missing_required_parameter", "url"),
        (request(url=[]), "invalid_url", "url"),
        (request(url="/v1/scorecard"), "invalid_url", "url"),
        (request(method="GET"), "invalid_method", "method"),
        (request(body={"model": "other"}), "model_not_found", "body.model"),
        (request(body={"model": 7}), "missing_required_parameter", "body.model"),
        (request(body={"model": "m", "stream": True}), "stream_not_supported", "body.stream"),
        (request(body={"model": "m", "stream": "True"}), "stream_not_supported", "body.stream"),
    ],
)
def test_each_error_has_its_code_and_line(
    line: dict[str, Any] | bytes, code: str, param: str | None
) -> None:
    """The lines around it are valid."""
    findings = check(request(), line, request())
    [error] = findings.errors
    assert (error.code, error.param, error.line) == (code, param, 2)
    assert findings.num_rows == 3
    assert findings.num_errors == 1


def test_the_only_model_may_be_left_out() -> None:
    """Lines of a server with two models need one."""
    assert check(request(body={})).model == "m"
    [error] = check(request(body={}), models=("m", "n")).errors
    assert error.code == "missing_required_parameter"
    assert "Served: m, n." in error.message


def test_a_file_has_one_model() -> None:
    """The first line with a served model decides; lines with another one are errors."""
    lines = [request(body={"model": model}) for model in ("x", "n", "m", "n")]
    findings = check(*lines, models=("m", "n"))
    assert findings.model == "n"
    assert [(error.code, error.line) for error in findings.errors] == [
        ("model_not_found", 1),
        ("model_mismatch", 3),
    ]


def test_without_a_served_model_every_line_is_an_error() -> None:
    """Lines without a model are errors too."""
    lines = [request(), request(body={})]
    findings = check(*lines, models=())
    assert codes(findings) == ["model_not_found", "missing_required_parameter"]
    assert all("Served: none." in error.message for error in findings.errors)


def asking(*models: str) -> list[dict[str, Any]]:
    """Return a valid line for each of these names."""
    return [request(body={"model": model}) for model in models]


def test_lines_may_mix_the_names_of_one_model() -> None:
    """The file is for the model behind the names."""
    findings = check(*asking("gpt", "m", "gpt-mini"), aliases={"gpt": "m", "gpt-mini": "m"})
    assert (findings.model, findings.errors) == ("m", [])


def test_lines_may_mix_a_model_and_its_adapters() -> None:
    """The file is for the model, whose workers run them all; another one's adapter is an error."""
    adapters = {"sql": "m", "tone": "m", "other": "n"}
    findings = check(*asking("sql", "m", "tone"), models=("m", "n"), aliases=adapters)
    assert (findings.model, findings.errors) == ("m", [])
    mixed = check(*asking("sql", "other"), models=("m", "n"), aliases=adapters)
    assert codes(mixed) == ["model_mismatch"]


def test_names_of_two_models_do_not_mix() -> None:
    """No line uses a model's own name."""
    aliases = {"a": "m", "b": "n"}
    findings = check(*asking("a", "b"), models=("m", "n"), aliases=aliases)
    assert codes(findings) == ["model_mismatch"]
    assert "the model is 'n', but earlier lines use 'm'" in findings.errors[0].message


def test_a_wildcard_matches_every_other_name() -> None:
    """Exact names take precedence, and a line without a model is ambiguous."""
    aliases = {"*": "n"}
    assert (
        check(*asking("gpt-4o", "n", "whatever"), models=("m", "n"), aliases=aliases).model == "n"
    )
    assert check(*asking("m"), models=("m", "n"), aliases=aliases).model == "m"
    assert codes(check(*asking("m", "gpt-4o"), models=("m", "n"), aliases=aliases)) == [
        "model_mismatch"
    ]
    nameless = check(request(body={}), models=("m", "n"), aliases=aliases)
    assert nameless.errors[0].message == "`model` is required. Served: m, n."
    assert check(request(body={}), aliases={"gpt": "m", "*": "m"}).model == "m"


def test_all_urls_must_match_a_given_endpoint() -> None:
    """Any spelling of the endpoint matches."""
    lines = [request(url="/chat/completions"), request(url="/v1/completions")]
    assert codes(check(*lines)) == []
    assert codes(check(*lines, endpoint=CHAT)) == ["url_mismatch"]


def test_objects_outside_the_tenants_media_are_errors() -> None:
    """Each names its place and the prefix; invalid addresses are left to the engine."""
    urls = [
        "s3://mine/media/t/a",
        "s3://mine/media/u/a",
        "S3://other/a",
        "s3://mine",
        "https://x.com/s3:/a",
    ]
    kinds = cycle(["image_url", "audio_url"])
    parts = [[{"type": kind, kind: {"url": url}}] for kind, url in zip(kinds, urls, strict=False)]
    lines: list[Any] = [
        request(body={"model": "m", "messages": [{"role": "user", "content": each}]})
        for each in parts
    ]
    lines.append(json.dumps(lines[1]).replace("s3:", "\\u00733\\u003a").encode())
    found = check(*lines, media=AllowedMedia("mine", "t"))
    place = "messages.0.content.0"
    may = "a batch may only read s3://mine/media/t/ here."
    other, foreign = f"`{place}` has another prefix: {may}", f"`{place}` is in bucket other: {may}"
    code, param = "fetch_failed", f"body.{place}"
    assert found.errors == [
        BatchError(code, other, param, 2),
        BatchError(code, foreign, param, 3),
        BatchError(code, other, param, 6),
    ]
    assert check(*lines).errors == []


def test_ids_of_invalid_lines_count_too() -> None:
    """They get a row, and two rows of one ID would be ambiguous."""
    found: list[tuple[str, int]] = []
    checker = LineChecker(
        Findings(), models={"m": "m"}, endpoint=None, add_id=lambda *each: found.append(each)
    )
    lines = [request(url=None), request(custom_id=None), request(body={"stream": True})]
    for number, line in enumerate(lines, start=1):
        checker.check(RawLine(number, json.dumps(line).encode()))
    assert found == [("c", 1), ("c", 3)]


def test_quoted_values_are_truncated() -> None:
    """A batch has room for a hundred messages, whatever is in the file."""
    findings = check(
        request(url="/" + "u" * 9999),
        request(body={"model": "m" * 9999}),
        request(method="P" * 9999),
        b'"' + b"s" * 9999,
    )
    assert all(len(error.message) < 500 for error in findings.errors)


def test_a_hundred_errors_are_listed_and_all_are_counted() -> None:
    """The last entry has the number of the others."""
    findings = check(*[b"{"] * 250)
    verdict = judge(findings, NO_DUPLICATES, mistake=None, on_invalid_line="fail")
    assert verdict.num_errors == 250
    assert [error.line for error in verdict.errors] == [*range(1, 101), None]
    assert verdict.errors[-1].message == "150 more errors are not listed."


@pytest.mark.parametrize("choice", ["fail", "skip"])
def test_unknown_parameters_are_errors_with_strict_parameters(choice: OnInvalidLine) -> None:
    """Each name is one error, at its first line; otherwise the file is valid."""
    findings = check(request(), *[request(body={"model": "m", "temprature": 1})] * 2)
    assert judge(findings, NO_DUPLICATES, mistake=None, on_invalid_line=choice) == Verdict()
    verdict = judge(
        findings, NO_DUPLICATES, mistake=None, on_invalid_line=choice, strict_parameters=True
    )
    message = f"`temprature` in 2 lines is not a parameter of {CHAT}; did you mean `temperature`?"
    error = BatchError("unknown_parameter", message, "body.temprature", 2)
    assert verdict == Verdict(1, (error,))


def test_repeated_ids_are_listed_in_line_order() -> None:
    """Both kinds count together, and the first hundred of both are listed."""
    findings = Findings(
        num_rows=1000,
        model="m",
        endpoint=CHAT,
        num_errors=60,
        errors=[BatchError("invalid_json_line", "x", None, 10 * n) for n in range(1, 61)],
    )
    duplicates = Duplicates(500, tuple(Duplicate(10 * n + 5, 1) for n in range(1, 101)))
    verdict = judge(findings, duplicates, mistake=None, on_invalid_line="fail")
    assert verdict.num_errors == 560
    lines = [error.line for error in verdict.errors[:-1]]
    assert lines == sorted([*range(10, 510, 10), *range(15, 515, 10)])
    assert verdict.errors[-1].message == "460 more errors are not listed."


def test_a_valid_file_has_no_errors() -> None:
    """The verdict's number of errors is 0."""
    verdict = judge(check(request()), NO_DUPLICATES, mistake="odd", on_invalid_line="fail")
    assert verdict.num_errors == 0
    assert verdict.errors == ()


def test_skipped_lines_do_not_fail_a_file() -> None:
    """It fails only if IDs repeat or no line can run."""
    findings = check(b"{", request())
    assert judge(findings, NO_DUPLICATES, mistake=None, on_invalid_line="skip").num_errors == 0
    duplicates = Duplicates(1, (Duplicate(9, 2),))
    [error] = judge(findings, duplicates, mistake=None, on_invalid_line="skip").errors
    assert (error.code, error.line) == ("duplicate_custom_id", 9)
    findings = check(b"{", b"}")
    verdict = judge(findings, NO_DUPLICATES, mistake=None, on_invalid_line="skip")
    assert [error.line for error in verdict.errors] == [1, 2]


def test_a_file_without_lines_is_empty() -> None:
    """The option for invalid lines does not matter."""
    for choice in ("fail", "skip"):
        verdict = judge(Findings(), NO_DUPLICATES, mistake=None, on_invalid_line=choice)
        assert [error.code for error in verdict.errors] == ["empty_file"]


def test_a_file_of_another_kind_gets_one_clear_message() -> None:
    """A description of its beginning replaces the errors of its lines."""
    findings = check(b"custom_id,url", b"a,b")
    verdict = judge(findings, NO_DUPLICATES, mistake="This is CSV.", on_invalid_line="fail")
    assert verdict.num_errors == 2
    assert verdict.errors == (BatchError("invalid_json_line", "This is CSV."),)


def test_long_urls_are_not_cached() -> None:
    """Cached URLs stay in a Lambda for hours, so only short ones are."""
    _route_of_short.cache_clear()
    findings = check(request(url="/x" * 1_000_000), request(url="/completions"))
    assert [error.code for error in findings.errors] == ["invalid_url"]
    assert _route_of_short.cache_info().currsize == 1
