"""Labels and moderations of texts as columns of a table, and as the rows of a comparison."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.model.encoders.small_encoders import save
from tidemill import Engine, RequestFailed
from tidemill.batch.table.writer import open_writer
from tidemill.cli.main import main

NAMES = ("anger", "violence", "not_toxic")
TEXTS = ["The tide comes in.", "A mill"]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small random classifier."""
    labels = {"id2label": dict(enumerate(NAMES)), "label2id": {}}
    return save(tmp_path_factory.mktemp("model"), "Bert", "ForSequenceClassification", **labels)


@pytest.fixture(name="engine", scope="module")
def fixture_engine(classifier: Path) -> Iterator[Engine]:
    """Return its engine, with one text per step: sums of fp32 depend on the texts next to each."""
    with Engine(str(classifier), device="cpu", max_num_seqs=1) as engine:
        yield engine


def test_texts_and_pairs_are_labeled(engine: Engine, classifier: Path, tmp_path: Path) -> None:
    """A table has the same labels, also a CSV, and is compared with JSON rows of the same texts."""
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


def test_texts_are_moderated(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table has the categories of the rows, of one text or several, and is compared with them."""
    url = "/v1/moderations"
    texts = {"one": [[TEXTS[0]], [TEXTS[1]]], "both": [TEXTS, TEXTS]}
    labels = engine.classify(TEXTS, progress=False)
    for name, inputs in texts.items():
        given = {"text": inputs, "id": ["1", "2"]}
        recipe = {"url": url, "input": "{{ text }}", "keep": ["id"]}
        table = engine.answer_table(given, progress=False, **recipe)
        bodies = [engine.answer_one({"input": each}, url=url) for each in inputs]
        rows = [
            {"custom_id": str(n), "response": {"status_code": 200, "body": body}, "error": None}
            for n, body in enumerate(bodies, 1)
        ]
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        for form in ("csv", "parquet"):
            with (tmp_path / f"{name}.{form}").open("wb") as file:
                writer = open_writer(file, table.schema, form)
                for batch in table.to_batches():
                    writer.write(batch)
                writer.close()
            assert main(["diff", f"{tmp_path}/{name}.{form}", f"{tmp_path}/rows.jsonl"]) == 0
        capsys.readouterr()
        if name == "one":
            for item, row in zip(labels, table.to_pylist(), strict=True):
                is_flagged = item["label"] != NAMES[2]
                expected = (is_flagged, [item["label"]] * is_flagged)
                assert (row["flagged"], row["categories"]) == expected
                scores = {one["category"]: one["score"] for one in row["category_scores"]}
                for label in NAMES[:2]:
                    assert scores.pop(label) == item["scores"][label]
                assert not any(scores.values())
        assert main(["view", f"{tmp_path}/rows.jsonl"]) == 0
        assert "flagged: " in capsys.readouterr().out


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
        failed = engine.answer_table({"text": [""]}, **given)
        assert failed.column_names == table.column_names == ["text", "spans", "usage", "error"]
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
