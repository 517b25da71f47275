"""Sparse vectors and vectors of tokens: in Python, as columns of a table, and in a comparison."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.model.encoders.small_encoders import save
from tidemill import Engine, RequestFailed, TidemillError
from tidemill.batch.file.answers import (
    Answer,
    NumberDifference,
    answer_of,
    difference_between,
    first_numbers,
)
from tidemill.cli.main import main
from tidemill.offline.rows.page.table_rows import cell_text

TEXTS = ["The tide comes in.", "A mill"]


def test_python_and_tables_have_all_kinds_of_vectors(tmp_path: Path) -> None:
    """BGE-M3 has both kinds; a table has a typed column for each task."""
    folder = save(tmp_path / "m3", "XLMRoberta", type_vocab_size=1)
    for name, width in (("sparse_linear.pt", 1), ("colbert_linear.pt", 48)):
        torch.save(torch.nn.Linear(48, width).state_dict(), folder / name)
    with Engine(str(folder), device="cpu", max_num_seqs=1) as engine:
        sparse = engine.embed_sparse(TEXTS, progress=False)
        rows = engine.embed_tokens(TEXTS, progress=False)
        tables = {
            task: engine.answer_table(
                {"text": [*TEXTS, ""]},
                url="/pooling",
                prompt="{{ text }}",
                params={"task": task},
                progress=False,
            )
            for task in ("embed_sparse", "token_embed", "token_classify")
        }
        with pytest.raises(RequestFailed, match="must not be empty"):
            engine.embed_sparse(["a", ""], progress=False)
        with pytest.raises(TypeError, match="a list of texts"):
            engine.embed_tokens("one text", progress=False)
        packed = engine.embed_tokens(TEXTS, progress=False, encoding_format="base64")
        assert [each.shape for each in packed] == [each.shape for each in rows]
        with pytest.raises(TidemillError, match=r"`params\.encoding_format` does not support"):
            engine.answer_table(
                {"text": TEXTS},
                url="/pooling",
                prompt="{{ text }}",
                params={"task": "token_embed", "encoding_format": ["base64"]},
            )
        for params in ({}, {"task": "embed"}, {"task": ["token_embed"]}):
            with pytest.raises(TidemillError, match=r"needs `params\.task` in tables"):
                engine.answer_table(
                    {"text": TEXTS}, url="/pooling", prompt="{{ text }}", params=params
                )
    found = tables["embed_sparse"].column("sparse_embedding").to_pylist()
    for pairs, vector in zip(found, sparse, strict=False):
        assert {pair["index"]: pair["value"] for pair in pairs} == pytest.approx(vector)
    cells = tables["token_embed"].column("token_embeddings").to_pylist()
    for cell, each in zip(cells, rows, strict=False):
        assert np.allclose(cell, each)
        assert np.allclose(np.linalg.norm(each, axis=1), 1, atol=1e-5)
    scores = tables["token_classify"].column("token_scores").to_pylist()
    assert [len(each) for each in scores[:2]] == [len(each) - 1 for each in rows]
    for table, column in zip(tables.values(), (found, cells, scores), strict=True):
        assert column[-1] is None
        assert "must not be empty" in table.column("error").to_pylist()[-1]


@pytest.mark.parametrize(
    ("column", "data"),
    [
        ("sparse_embedding", [{"index": 30_000, "value": 0.5}, {"index": 9, "value": 0.25}]),
        ("token_embeddings", [[0.5, -0.5], [0.25, 1.0]]),
    ],
)
def test_tables_and_rows_are_compared(
    column: str, data: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A CSV and the rows of a file with the same numbers are alike."""
    usage = {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    item = {"index": 0, "object": "pooling", "data": data}
    body = {"object": "list", "data": [item], "usage": usage}
    row = {"custom_id": "1", "response": {"status_code": 200, "body": body}, "error": None}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    cells = ",".join('"{}"'.format(json.dumps(cell).replace('"', '""')) for cell in (data, usage))
    (tmp_path / "out.csv").write_text(f"text,{column},usage,error\ntide,{cells},\n")
    pair = [f"{tmp_path}/out.csv", f"{tmp_path}/rows.jsonl"]
    assert main(["diff", *pair]) == 0
    assert "1 are identical" in capsys.readouterr().out
    (tmp_path / "rows.jsonl").write_text(json.dumps(row).replace("0.25", "0.75") + "\n")
    assert main(["diff", *pair]) == 0
    assert "numbers differ by up to 0.5" in capsys.readouterr().out


def test_sparse_vectors_are_compared_by_index() -> None:
    """An index that one of them lacks is a zero; the indexes are not numbers of the vector."""

    def answer(*pairs: tuple[object, object]) -> Answer:
        data = [{"index": index, "value": value} for index, value in pairs]
        return answer_of({"data": [{"index": 0, "object": "pooling", "data": data}]})

    one = answer((7, 3.0), (30_000, 4.0))
    assert difference_between(one, answer((30_000, 4.0), (7, 3.0))) is None
    found = difference_between(one, answer((7, 3.0), (40_000, 4.0)))
    assert isinstance(found, NumberDifference)
    assert found.max_abs == 4.0
    assert found.cosine == pytest.approx(9 / 25)
    assert difference_between(one, answer()) == NumberDifference(4.0, None)
    assert difference_between(answer(), answer()) is None
    assert answer((1.5, 2.0)).vectors == answer((1, "2")).vectors == ()


def test_base64_of_tokens_is_compared_as_numbers() -> None:
    """The same numbers in base64 and as lists are alike."""
    rows = [[0.5, -0.5], [0.25, 1.0]]
    packed = b64encode(np.array(rows, "<f4").tobytes()).decode()
    one, other = (
        answer_of({"data": [{"index": 0, "object": "pooling", "data": data}]})
        for data in (rows, packed)
    )
    assert difference_between(one, other) is None
    assert len(other.vectors[0]) == 4


def test_long_sparse_vectors_are_shown_by_their_first_numbers() -> None:
    """A cell of a table has hundreds of pairs."""
    pairs = [{"index": 10 * place, "value": place / 8} for place in range(1, 7)]
    shown = "10: 0.125, 20: 0.25, 30: 0.375, 40: 0.5, … (6 numbers)"
    assert cell_text(pairs) == shown
    assert cell_text(pairs[:1]) == '[{"index": 10, "value": 0.125}]'
    assert first_numbers({10 * place: place / 8 for place in range(1, 7)}, 4) == shown


def test_each_text_of_tokens_is_a_request() -> None:
    """Vectors of many long texts would not fit into one response."""
    sent: list[dict[str, Any]] = []

    def answer_many(bodies: Iterable[dict[str, Any]], **_: object) -> Iterator[dict[str, Any]]:
        for body in bodies:
            sent.append(body)
            yield {"data": [{"data": [[1.0, 2.0]]} for _ in body["input"]]}

    engine = Engine.__new__(Engine)
    engine.answer_many = answer_many  # type: ignore[assignment,method-assign]
    found = engine.embed_tokens(["a", "b", "c"], progress=False)
    assert [each.shape for each in found] == [(1, 2)] * 3
    assert [body["input"] for body in sent] == [["a"], ["b"], ["c"]]
