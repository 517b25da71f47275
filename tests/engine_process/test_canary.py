"""The canary of a worker: which rows indicate a faulty machine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidemill.engine_process.canary import Canary, canary_line
from tidemill.engine_process.frames import Row
from tidemill.protocol.contract import Usage


def row(body: dict[str, Any], status: int = 200) -> Row:
    """Return the row of a canary request."""
    printed = {"id": "x", "custom_id": "known", "error": None}
    printed["response"] = {"status_code": status, "request_id": "x", "body": body}
    return Row(1, status == 200, Usage(), json.dumps(printed).encode() + b"\n")


def text(words: str) -> dict[str, Any]:
    """Return the body of a completion."""
    return {"choices": [{"text": words}]}


def vector(*values: float) -> dict[str, Any]:
    """Return the body of a vector."""
    return {"data": [{"embedding": list(values)}]}


def score(value: float) -> dict[str, Any]:
    """Return the body of a score."""
    return {"data": [{"score": value}]}


def tokens(*rows: list[float]) -> dict[str, Any]:
    """Return the body of a row for each token."""
    return {"data": [{"data": list(rows)}]}


def sparse(**weights: float) -> dict[str, Any]:
    """Return the body of a sparse vector, with an index in each name."""
    pairs = [{"index": int(name[1:]), "value": value} for name, value in weights.items()]
    return {"data": [{"data": pairs}]}


ALIKE = [
    (text(" and goes out"), text(" and goes in")),
    (vector(0.6, 0.8), vector(0.602, 0.797)),
    (score(0.9), score(0.91)),
    ({"text": ""}, {"text": ""}),
    (tokens([0.9, 0.1], [0.2, 0.8]), tokens([0.91, 0.09], [0.2, 0.8])),
    (sparse(_3=0.9, _7=0.01), sparse(_3=0.91, _8=0.01)),
    (sparse(), sparse()),
]
OTHERS = [
    (text(" and goes out"), text(" \ufffd\ufffd")),
    (vector(0.6, 0.8), vector(0.8, -0.6)),
    (vector(0.6, 0.8), vector(0.6)),
    (score(0.9), score(0.1)),
    (vector(0.0, 0.0), vector(1.0, 0.0)),
    (text("and"), vector(1.0)),
    (vector(1.0), text("and")),
    ({"text": ""}, {"text": "the the the"}),
    # One token of 400 is wrong: 0.04 of the norm of all rows.
    (tokens(*[[0.9, 0.1]] * 400), tokens([0.1, 0.9], *[[0.9, 0.1]] * 399)),
    (tokens([1.0, 0.0]), tokens([1.0, 0.0], [1.0, 0.0])),
    (sparse(_3=0.9), sparse(_4=0.9)),
    (sparse(_3=0.9), sparse()),
    (sparse(_3=0.9), tokens([0.9])),
]


@pytest.mark.parametrize(("before", "now"), ALIKE)
def test_an_engine_with_equal_results_up_to_rounding_is_healthy(
    before: dict[str, Any], now: dict[str, Any]
) -> None:
    """Engines of one machine may add numbers in another order."""
    canary = Canary(b"line")
    assert canary.find_fault(row(before)) is None
    assert canary.find_fault(row(now)) is None


@pytest.mark.parametrize(("before", "now"), OTHERS)
def test_an_engine_with_another_result_is_faulty(
    before: dict[str, Any], now: dict[str, Any]
) -> None:
    """The result of the first run is the expected result of all others."""
    canary = Canary(b"line")
    assert canary.find_fault(row(before)) is None
    assert canary.find_fault(row(now)) == "the canary request had another result than before"
    assert canary.find_fault(row(before)) is None


def test_a_failure_indicates_a_faulty_machine_and_a_refusal_does_not() -> None:
    """A model may refuse the request, which is not the machine's fault."""
    canary = Canary(b"line")
    assert canary.find_fault(row({"error": {"message": "no"}}, 400)) is None
    fault = canary.find_fault(row({"error": {"message": "no"}}, 500))
    assert fault == "the canary request failed with status 500"
    assert canary.find_fault(row(text("and"))) is None


@pytest.mark.parametrize("url", ["/v1/completions", "/v1/embeddings", "/v1/score", "/pooling"])
def test_each_kind_of_model_has_a_canary_request(url: str) -> None:
    """The model's endpoints determine it."""
    line = canary_line([url])
    assert line is not None
    assert json.loads(line)["url"] == url
    assert canary_line(["/v1/other"]) is None
