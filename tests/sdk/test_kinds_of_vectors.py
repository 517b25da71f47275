"""Sparse vectors and vectors of tokens: in Python, as columns of a table, and in a comparison."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.model.encoders.small_encoders import save
from tidemill import Engine, RequestFailed, TidemillError
from tidemill.cli.main import main

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
        ("sparse_embedding", [{"index": 3, "value": 0.5}, {"index": 9, "value": 0.25}]),
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
