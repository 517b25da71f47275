"""Labels of texts by `Engine.classify`, as columns of a table, and as the rows of a comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.model.encoders.small_encoders import save
from tidemill import Engine, RequestFailed
from tidemill.cli.main import main

NAMES = ("anger", "joy", "fear")
TEXTS = ["The tide comes in.", "A mill"]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small random classifier."""
    labels = {"id2label": dict(enumerate(NAMES)), "label2id": {}}
    return save(tmp_path_factory.mktemp("model"), "Bert", "ForSequenceClassification", **labels)


def test_texts_and_pairs_are_labeled(classifier: Path, tmp_path: Path) -> None:
    """A table has the same labels, also a CSV, and is compared with JSON rows of the same texts."""
    # One text per step: sums of fp32 depend on the texts next to each.
    with Engine(str(classifier), device="cpu", max_num_seqs=1) as engine:
        one, other = engine.classify(TEXTS, progress=False)
        [pair] = engine.classify([("The tide", "falls")], progress=False)
        by_ids = engine.classify([(101, 2003, 102)], progress=False)  # type: ignore[list-item]
        assert by_ids == engine.classify([[101, 2003, 102]], progress=False)  # type: ignore[list-item]
        given = {"url": "/v1/classify", "prompt": "{{ text }}", "progress": False}
        table = engine.answer_table({"text": TEXTS}, **given)
        with pytest.raises(RequestFailed, match=r"`input\.1` must not be empty"):
            engine.classify(["a", ""], progress=False)
        with pytest.raises(TypeError, match="a list of texts"):
            engine.classify("one text", progress=False)
        with pytest.raises(TypeError, match="a pair must have two texts"):
            engine.classify([("a", "b", "c")], progress=False)  # type: ignore[list-item]
    assert tuple(one["scores"]) == NAMES
    assert one["score"] == one["scores"][one["label"]] == max(one["scores"].values())
    assert pair["scores"] not in (one["scores"], other["scores"])
    assert table.column("label").to_pylist() == [one["label"], other["label"]]
    assert table.column("score").to_pylist() == [one["score"], other["score"]]
    (tmp_path / "in.csv").write_text("text\n" + "".join(f"{text}\n" for text in TEXTS))
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/classify", "body": {"input": text}}
        for n, text in enumerate(TEXTS, 1)
    ]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    model = ["--model", str(classifier), "--device", "cpu", "-dp", "2"]
    recipe = ["--url", "/v1/classify", "--prompt", "{{ text }}"]
    csv, rows = f"{tmp_path}/out.csv", f"{tmp_path}/out.jsonl"
    assert main(["run", "-i", f"{tmp_path}/in.csv", "-o", csv, *model, *recipe]) == 0
    assert main(["run", "-i", f"{tmp_path}/in.jsonl", "-o", rows, *model]) == 0
    assert main(["diff", csv, rows]) == 0
    moderate = ["--url", "/v1/moderations", "--prompt", "{{ text }}"]
    assert main(["run", "-i", f"{tmp_path}/in.csv", "-o", csv, "--force", *model, *moderate]) != 0


SPANS = {"id2label": {0: "O", 1: "B-PER", 2: "I-PER"}, "label2id": {}}


@pytest.fixture(scope="module")
def token_classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small random token classifier."""
    return save(tmp_path_factory.mktemp("model"), "Bert", "ForTokenClassification", **SPANS)


def test_spans_of_texts(token_classifier: Path, tmp_path: Path) -> None:
    """Python, tables of any format and rows have the same ones, also after an interruption."""
    given = {"url": "/v1/classify", "prompt": "{{ text }}", "progress": False}
    with Engine(str(token_classifier), device="cpu", max_num_seqs=1) as engine:
        found = engine.classify(TEXTS, progress=False)
        words = engine.classify(TEXTS, progress=False, aggregation_strategy="none")
        table = engine.answer_table({"text": [*TEXTS, ""]}, **given)
        with pytest.raises(RequestFailed, match="this is a token classifier"):
            engine.classify([("a", "b")], progress=False)
    assert len(words[0]["spans"]) >= len(found[0]["spans"]) > 0
    for item, text in zip(found, TEXTS, strict=True):
        assert all(text[each["start"] : each["end"]] == each["text"] for each in item["spans"])
    expected = [item["spans"] for item in found]
    assert table.column("spans").to_pylist() == [*expected, None]
    assert "must not be empty" in table.column("error").to_pylist()[-1]
    (tmp_path / "in.csv").write_text("text\n" + "".join(f"{text}\n" for text in TEXTS))
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/classify", "body": {"input": text}}
        for n, text in enumerate(TEXTS, 1)
    ]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    model = ["--model", str(token_classifier), "--device", "cpu"]
    recipe = ["--url", "/v1/classify", "--prompt", "{{ text }}"]
    csv, rows = tmp_path / "out.csv", tmp_path / "out.jsonl"
    reuse = ["--reuse", f"{tmp_path}/results"]
    again = [*model, "-dp", "2", "--resume"]
    assert main(["run", "-i", f"{tmp_path}/in.jsonl", "-o", str(rows), *model, *reuse]) == 0
    first, _ = rows.read_bytes().splitlines(keepends=True)
    rows.write_bytes(first)
    assert main(["run", "-i", f"{tmp_path}/in.jsonl", "-o", str(rows), *again]) == 0
    assert main(["run", "-i", f"{tmp_path}/in.csv", "-o", str(csv), *model, *recipe, *reuse]) == 0
    assert main(["diff", str(csv), str(rows)]) == 0
    answers = [
        json.loads(row)["response"]["body"]["data"][0] for row in rows.read_text().splitlines()
    ]
    for item, spans in zip(answers, expected, strict=True):
        assert [(one["label"], one["text"]) for one in item["spans"]] == [
            (one["label"], one["text"]) for one in spans
        ]
