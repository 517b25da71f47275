"""Rows exported as CSV and Parquet, joined of pieces as the page joins them."""

from __future__ import annotations

import base64
import csv
import io
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import pytest
from pyarrow import parquet

from tests.dashboard.test_row_view import chat, row_of
from tidemill.dashboard import row_export, rows_page
from tidemill.dashboard.row_export import export_piece
from tidemill.dashboard.row_query import BadQuery, RowQuery
from tidemill.dashboard.rows_page import SearchedRow, StoredRows, select_rows

HOSTILE = 'a,"b"\r\nc\u2028d\ud800e\0 \u202e<script>'


class Rows:
    """Rows of the lines 1, 2, and so on; None is one that is too large."""

    def __init__(self, rows: Sequence[bytes | None]) -> None:
        self.rows = rows
        self.num_calls = 0

    def find(self, query: RowQuery, limit: int, max_bytes: int) -> StoredRows:
        """Return the rows that match."""
        self.num_calls += 1
        behind = enumerate(self.rows[query.begin - 1 :], query.begin)
        found = (SearchedRow(line, data) for line, data in behind)
        return select_rows(found, query, limit, max_bytes=max_bytes)


def exported(source: Rows, form: str, **fields: str) -> bytes:
    """Return the file that the page joins."""
    parts, groups, columns, num_rows = b"", [], "", 0
    after: int | None = 0
    while after is not None:
        place = {"after": str(after), "start": str(len(parts)), "columns": columns}
        about, data = split(
            export_piece(source, {"format": form, "status": "all", **place, **fields})
        )
        end = len(data) - about.get("about", 0)
        parts += data[:end]
        groups += [data[end:]] if data[end:] else []
        num_rows, after, columns = num_rows + about["rows"], about["after"], about["columns"]
    if groups:
        end_of = f"{num_rows},{len(groups)},{len(b''.join(groups))}"
        about, data = split(
            export_piece(source, {"format": form, "columns": columns, "end": end_of})
        )
        end = len(data) - about["about"]
        parts += data[:end] + b"".join(groups) + data[end:]
    return parts


def split(piece: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the JSON of a piece and its bytes."""
    head, _, data = piece.partition(b"\n")
    return json.loads(head), data


def as_csv(source: Rows, **fields: str) -> list[dict[str, str]]:
    """Return the rows of the CSV file."""
    text = exported(source, "csv", **fields).decode("utf-8-sig")
    return [*csv.DictReader(io.StringIO(text, newline=""))]


def as_parquet(source: Rows, **fields: str) -> list[dict[str, Any]]:
    """Return the rows of the Parquet file, as Arrow reads them."""
    rows: list[dict[str, Any]] = parquet.read_table(
        io.BytesIO(exported(source, "parquet", **fields))
    ).to_pylist()
    return rows


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cells with a value."""
    return {name: cell for name, cell in row.items() if cell not in {None, ""}}


FAILED = row_of({"error": {"code": "bad", "message": "No."}}, 400, custom_id="f")
USAGE = {"prompt_tokens": 3, "completion_tokens": 7}


def test_every_row_has_its_answer_or_its_error() -> None:
    """Lines that are not rows, and rows that are too large, have an error."""
    source = Rows(
        [
            row_of(chat("Hi", finish_reason="stop") | {"usage": USAGE}),
            FAILED,
            None,
            b"no row {",
            row_of({"choices": [{"text": "b"}, {"text": "c", "finish_reason": "length"}]}),
            row_of({"text": "spoken"}),
        ]
    )
    found = as_parquet(source)
    data = exported(source, "parquet")
    group = parquet.ParquetFile(io.BytesIO(data)).metadata.row_group(0)
    sizes = [group.column(n).total_uncompressed_size for n in range(group.num_columns)]
    assert group.total_byte_size == sum(sizes)
    assert [without_nulls(row) for row in found] == [
        {
            "line": 1,
            "custom_id": "a",
            "answer": "Hi",
            "finish_reason": "stop",
            **USAGE,
        },
        {"line": 2, "custom_id": "f", "error_code": "bad", "error": "No."},
        {
            "line": 3,
            "error_code": "row_too_large",
            "error": "The row is too large: it is in the batch's files.",
        },
        {"line": 4, "error_code": "invalid_row", "error": "This line is not a row."},
        {
            "line": 5,
            "custom_id": "a",
            "answer": '["b", "c"]',
            "finish_reason": "none, length",
        },
        {"line": 6, "custom_id": "a", "answer": "spoken"},
    ]
    for row, same in zip(as_csv(source), found, strict=True):
        assert without_nulls(row) == {name: str(cell) for name, cell in without_nulls(same).items()}


def test_decisions_have_columns_of_their_questions() -> None:
    """A question named as another column has a mark; one that comes later is in no column."""
    yes = {"type": "predicate", "probability": 0.75}
    named = [{"name": name, **yes} for name in ("ok", "error", "ok_probability")]
    late = [{"name": "ok", "type": "refusal"}, {"name": "later", **yes}]
    source = Rows([FAILED, row_of({"answers": named}), row_of({"answers": {"ok": yes}})])
    _, first, second = as_parquet(source)
    assert (first["ok"], first["ok_probability"]) == ("yes", 0.75)
    assert (first["error_"], first["error_probability"]) == ("yes", 0.75)
    assert (first["ok_probability_"], first["error"]) == ("yes", None)
    assert (second["ok"], second["error_"]) == ("yes", None)
    huge = {"answers": {"ok": {"type": "predicate", "probability": 10**400}}}
    assert as_parquet(Rows([row_of({"answers": named}), row_of(huge)]))[1]["ok"] is None
    shape = json.loads(
        split(export_piece(source, {"format": "csv", "status": "all"}))[0]["columns"]
    )
    assert shape == ["", "ok", "error", "ok_probability"]
    source.rows = [*source.rows, row_of({"answers": late})]
    last = as_parquet(source, columns=json.dumps(["", "ok"]))[-1]
    assert last["ok"] == "refusal"
    assert last["answer"] == "ok: refusal\nlater: yes (0.750)"


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_columns_are_those_of_the_first_answers(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed rows may fill the first pieces; a name that is too long has no column."""
    monkeypatch.setattr(row_export, "_PIECE_ROWS", 5)
    monkeypatch.setattr(row_export, "_PIECE_BYTES", 1000)
    yes = {"type": "predicate", "probability": 1}
    names = ["Ok", "ok", "ok" * 40, "\ud800"]
    source = Rows([FAILED] * 40 + [row_of({"answers": dict.fromkeys(names, yes)})])
    found = (as_csv if form == "csv" else as_parquet)(source)
    assert (found[-1]["Ok"], found[-1]["ok_"]) == ("yes", "yes")
    assert not {"ok" * 40, "\ufffd"} & {*found[-1]}
    assert f"{'ok' * 40}: yes" in found[-1]["answer"]


def test_columns_fit_in_a_url() -> None:
    """Names of many bytes leave fewer questions; the answer has all."""
    yes = {"type": "predicate", "probability": 1}
    source = Rows([row_of({"answers": {f"{n}{'質' * 50}": yes for n in range(50)}})])
    about, _ = split(export_piece(source, {"format": "csv"}))
    assert 4000 < len(quote(about["columns"])) <= 5000
    assert len(json.loads(about["columns"])) > 5


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize(
    "body",
    [
        chat("\r\0" + '"' * 50),
        {"data": [{"score": -2.2250738585072014e-308 / (n + 1)} for n in range(40)]},
        {"data": [{"embedding": [-1.23456789e-30] * 100}]},
        {"answers": {str(n): {"type": "predicate", "probability": 1 / 3} for n in range(50)}},
    ],
)
def test_a_piece_fits_in_a_response(
    form: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Base64 must leave it below 6 MB, of which a piece here has a part."""
    monkeypatch.setattr(row_export, "_PIECE_BYTES", 3 * 2**15)
    many = Rows([row_of(body)] * 4000)
    monkeypatch.setattr(many, "find", lambda *_: StoredRows([*enumerate(many.rows, 1)], 4000))
    piece = export_piece(many, {"format": form})
    assert split(piece)[0]["after"] is not None
    assert len(piece) * 4 / 3 < 6_000_000 / 32


def test_vectors_and_scores_are_lists_of_numbers() -> None:
    """Vectors are 32-bit, from both encodings; several of one request are JSON."""
    packed = base64.b64encode(struct.pack("<2f", 0.1, -3)).decode()
    many = [{"index": place, "embedding": [place, 0.5]} for place in range(2)]
    vectors = Rows(
        [
            row_of({"data": [{"embedding": [0.5, 1e300]}]}),
            row_of({"data": [{"embedding": packed}]}),
            FAILED,
            row_of({"data": many}),
        ]
    )
    first, second, failed, last = as_parquet(vectors)
    assert (first["embedding"], first["answer"]) == ([0.5, float("inf")], None)
    assert second["embedding"] == [pytest.approx(0.1), -3]
    assert (failed["embedding"], failed["error"]) == (None, "No.")
    assert (last["embedding"], last["answer"]) == (None, "[[0, 0.5], [1, 0.5]]")
    assert as_csv(vectors)[1]["embedding"] == "[0.100000001,-3]"
    scores = Rows([row_of({"data": [{"score": 0.1}, {"score": 1}]}), row_of({"results": []})])
    assert [row["scores"] for row in as_parquet(scores)] == [[0.1, 1.0], None]
    assert as_csv(scores)[0]["scores"] == "[0.1,1]"


def test_hostile_texts_are_cells() -> None:
    """Unpaired surrogates become U+FFFD; CSV marks formulas with an apostrophe."""
    texts = [HOSTILE, "=1+1", "+49 30", "-5", "@x", "\t=1", "1\r2", "-1e+5", "-1e5+1", "", "x" * 5]
    source = Rows([row_of(chat(text), custom_id=f"={text}") for text in texts])
    assert [row["answer"] for row in as_parquet(source)] == [
        HOSTILE.replace("\ud800", "\ufffd"), *texts[1:],
    ]  # fmt: skip
    found = as_csv(source)
    assert [row["answer"] for row in found] == [
        HOSTILE.replace("\ud800", "\ufffd").replace("\0", "\ufffd"),
        *("'=1+1", "'+49 30", "-5", "'@x", "'\t=1", "1\r2", "-1e+5", "'-1e5+1", "", "x" * 5),
    ]
    assert found[3]["custom_id"] == "'=-5"


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_pieces_of_any_size_make_the_same_file(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are in order, each once; a row larger than a piece has an error."""
    texts = [f"{number} " + "x" * (number % 40) for number in range(300)]
    rows: list[bytes | None] = [row_of(chat(text)) for text in texts]
    rows[100] = row_of(chat("y" * 5000, finish_reason="length") | {"usage": USAGE})
    read = as_csv if form == "csv" else as_parquet
    monkeypatch.setattr(row_export, "_PIECE_BYTES", 3000)
    monkeypatch.setattr(row_export, "_PIECE_ROWS", 7)
    source = Rows(rows)
    found = read(source)
    assert source.num_calls > 40
    assert [int(row["line"]) for row in found] == [*range(1, 301)]
    assert found[100]["error_code"] == "row_too_large"
    assert (found[100]["custom_id"], found[100]["finish_reason"]) == ("a", "length")
    assert [int(found[100][name]) for name in USAGE] == [3, 7]
    assert [row["answer"] for row in found if not row["error"]] == [*texts[:100], *texts[101:]]


def test_a_search_restricts_the_rows() -> None:
    """Rows of other lines and status are left out; without any row there is no file."""
    source = Rows([row_of(chat("one")), FAILED, row_of(chat("another one"))])
    assert [row["line"] for row in as_parquet(source, text="ONE")] == [1, 3]
    assert [row["line"] for row in as_csv(source, status="failed")] == ["2"]
    assert exported(source, "parquet", text="nothing") == b""
    large = Rows([row_of(chat("one" + "x" * 2**20))] * 9)
    found = large.find(RowQuery.of({"text": "one"}), 100, rows_page.SEARCHED_BYTES)
    assert [line for line, _ in found.rows] == [1, 2, 3]  # as many as a piece has room for


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"format": "xml"},
        {"format": "csv", "columns": "{"},
        {"format": "csv", "columns": '["x"]'},
        {"format": "csv", "columns": "[1]"},
        {"format": "parquet", "end": "1,2,3"},
        {"format": "parquet", "end": "1,2", "columns": '[""]'},
        {"format": "parquet", "end": "1,1,5000000000", "columns": '[""]'},
        {"format": "csv", "columns": "[" * 100_000},
        {"format": "parquet", "start": "-1"},
        {"format": "parquet", "start": "9" * 5000},
        {"format": "csv", "min_chars": "x"},
    ],
)
def test_other_parameters_are_refused(fields: dict[str, str]) -> None:
    """The message says what to do."""
    with pytest.raises(BadQuery, match=r"choose csv|reload the page|whole number"):
        export_piece(Rows([]), fields)
