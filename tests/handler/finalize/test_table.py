"""Tables that are dropped: their rows become requests by a recipe, and results a table again."""

from __future__ import annotations

import gzip
import hashlib
import io
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv, ipc, json
from pydantic_core import from_json, to_json

from tests.emulators import MODEL, Emulator
from tests.handler.finalize.rig import fail, plenty
from tests.handler.intake.rig import Cloud, lines_of
from tests.handler.killing import is_killed_after
from tests.long_parameters import with_long
from tidemill.batch.batch_request import parse_request
from tidemill.batch.escalation import Escalation
from tidemill.batch.model import Batch
from tidemill.batch.parts import FinishedRow, encode_part
from tidemill.batch.states import Status
from tidemill.batch.stored_file import File
from tidemill.batch.table.recipe import print_recipe
from tidemill.handler.control.sweep import sweep
from tidemill.handler.finalize import upload_results
from tidemill.handler.finalize.finalize import finalize
from tidemill.handler.finalize.table import make_table
from tidemill.handler.finalize.upload_results import MAX_TRIES
from tidemill.handler.intake import intake
from tidemill.handler.intake.new_batch import create_batch, create_batch_of_drop
from tidemill.handler.lambdas.intake import handle_message
from tidemill.handler.lifecycle.cancel import cancel
from tidemill.protocol.contract import Usage

REVIEWS = pa.table(
    {
        "review_id": ["a", "b", "c", "d"],
        "stars": pa.array([1, 2, 3, 4], pa.int8()),
        "text": ["bad", "so, so", 'a "good" one', "best\nof all"],
    }
)
FAR = pa.timestamp("ms", "Mars/Phobos")
DECISIONS = "/v1/decisions"
QUESTION = {"type": "predicate", "instructions": "Is it good?"}
RECIPE = b"prompt = 'Label: {{ text }}'\nid = 'review_id'\nparams = {max_tokens = 4}\n"


@pytest.fixture
def mini(ministack: Emulator) -> Cloud:
    """Return a deployment with small shards, for what is not about AWS."""
    return Cloud.on(ministack, shard_lines="10")


def parquet(table: pa.Table, **options: Any) -> bytes:
    """Return a table as Parquet."""
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def arrow(table: pa.Table) -> bytes:
    """Return a table as an Arrow file."""
    sink = io.BytesIO()
    with ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def comma_separated(table: pa.Table) -> bytes:
    """Return a table as CSV."""
    sink = io.BytesIO()
    csv.write_csv(table, sink)
    return sink.getvalue()


def json_lines(table: pa.Table) -> bytes:
    """Return a table as JSON lines."""
    return b"".join(to_json(row) + b"\n" for row in table.to_pylist())


def drop(cloud: Cloud, data: bytes, key: str, recipe: bytes | None = RECIPE) -> Batch:
    """Drop a recipe and a table next to it, and take in the table."""
    if recipe is not None:
        cloud.put(recipe, f"{key.removesuffix('.gz').rpartition('.')[0]}.recipe.toml")
    return cloud.ingest(cloud.create(data, key))


def row_of(number: int, line: dict[str, Any]) -> FinishedRow:
    """Return the answer to a line: its prompt, in capitals, or flags; the second is refused."""
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    if "messages" in line["body"]:
        text = line["body"]["messages"][-1]["content"].upper()
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        body: dict[str, Any] = {"choices": [choice], "usage": usage}
    else:
        flags = {"spam": len(line["body"]["input"]) < 4}
        result = {"flagged": flags["spam"], "categories": flags, "category_scores": {"spam": 0.5}}
        body = {"results": [result]}
    is_success = number != 2
    if not is_success:
        body = {"error": {"message": "no", "type": "invalid_request_error"}}
    response = {"status_code": 200 if is_success else 400, "request_id": "r", "body": body}
    row = {"id": "x", "custom_id": line["custom_id"], "response": response, "error": None}
    return FinishedRow(number, to_json(row) + b"\n", is_success, Usage(3, 0, 2))


def run_shards(cloud: Cloud, batch: Batch, numbers: Iterable[int]) -> None:
    """Run shards to their end as a worker."""
    bucket, table = cloud.deployment.bucket, cloud.deployment.table
    lines = cloud.run(bucket.get(batch.source.key)).splitlines()
    for number in numbers:
        shard = cloud.claim(batch.id, number)
        lines_of_shard = range(shard.first_line, shard.first_line + shard.num_rows)
        part = encode_part(row_of(each, from_json(lines[each - 1])) for each in lines_of_shard)
        cloud.run(bucket.put_part(shard, 0, part))
        index = cloud.run(bucket.index_parts(batch.id, number, left_out=fail))
        seal = index.seal()
        cloud.run(bucket.put_segments(shard, seal))
        sizes = [[each.num_bytes for each in side] for side in (seal.output, seal.errors)]
        committed = table.commit(
            shard, progress=index.progress(), output_sizes=sizes[0], error_sizes=sizes[1]
        )
        cloud.run(committed)


def published(cloud: Cloud, batch: Batch, outcome: str = "completed") -> Batch:
    """Run what is left of a batch, and finalize it until its table is due."""
    pending = [shard.number for shard in cloud.shards(batch.id)] if outcome == "completed" else []
    run_shards(cloud, batch, pending)
    now = int(time.time())
    moved = cloud.deployment.table.move_batch(batch.id, Status.FINALIZING, now, outcome=outcome)
    cloud.run(moved)
    finalize(cloud.aws, cloud.deployment, cloud.batch(batch.id), plenty)
    return cloud.batch(batch.id)


def finished(cloud: Cloud, batch: Batch) -> Batch:
    """Handle what finalize and intake ring for until the batch has ended."""
    for _ in range(10):
        for message in cloud.messages(cloud.deployment.intake):
            handle_message(cloud.aws, cloud.deployment, to_json(message).decode(), plenty)
        if (latest := cloud.batch(batch.id)).is_terminal:
            return latest
        finalize(cloud.aws, cloud.deployment, latest, plenty)
    raise AssertionError("it does not end")


def table_of(cloud: Cloud, batch: Batch) -> bytes:
    """Return the bytes of a batch's table."""
    assert batch.outputs.table_key is not None
    data: bytes = cloud.run(cloud.deployment.bucket.get(batch.outputs.table_key))
    return data


def test_a_moderated_table_has_its_flags(files: Cloud) -> None:
    """The text of a row is its `input`."""
    recipe = b"url = '/v1/moderations'\nprompt = '{{ text }}'\nkeep = ['review_id']\n"
    batch = drop(files, comma_separated(REVIEWS), "input/moderated.csv", recipe)
    assert (batch.status, batch.endpoint) == (Status.IN_PROGRESS, "/v1/moderations")
    ended = finished(files, published(files, batch))
    assert (ended.status, ended.errors) == (Status.COMPLETED, ())
    made = csv.read_csv(io.BytesIO(table_of(files, ended)))
    names = ["review_id", "flagged", "categories", "category_scores", "usage", "error"]
    assert made.column_names == names
    assert made["flagged"].to_pylist() == [True, None, False, False]
    assert made["error"].to_pylist()[1] == "no"


def test_a_parquet_file_comes_back_as_one(files: Cloud) -> None:
    """It has its columns and those of the results; rows and errors are next to it."""
    batch = drop(files, parquet(REVIEWS), "input/reviews.parquet")
    assert (batch.status, batch.num_rows) == (Status.IN_PROGRESS, 4)
    assert batch.outputs.table_key == "output/reviews.parquet"
    lines = files.run(files.deployment.bucket.get(batch.source.key)).splitlines()
    assert from_json(lines[1]) == {
        "custom_id": "b",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "Label: so, so"}], "max_tokens": 4},
    }
    due = published(files, batch)
    assert due.is_table_due
    assert due.output_file_id is not None
    ended = finished(files, due)
    assert (ended.status, ended.errors) == (Status.COMPLETED, ())
    made = pq.read_table(io.BytesIO(table_of(files, ended)))
    results = ["output_text", "finish_reason", "usage", "error"]
    assert made.schema.names == [*REVIEWS.schema.names, *results]
    assert made.select(REVIEWS.schema.names).equals(REVIEWS)
    good = ["LABEL: BAD", None, 'LABEL: A "GOOD" ONE', "LABEL: BEST\nOF ALL"]
    assert made["output_text"].to_pylist() == good
    assert made["error"].to_pylist() == [None, "no", None, None]
    file = files.run(files.deployment.files.get_file(ended.table_file_id or ""))
    assert file is not None
    assert (file.key, file.tenant) == (ended.outputs.table_key, ended.tenant)
    report = from_json(files.run(files.deployment.bucket.get(ended.outputs.report_key)))
    assert report["tidemill"]["table_url"] == f"s3://{files.bucket}/output/reviews.parquet"
    assert report["tidemill"]["is_table"]


def decision_of(number: int, line: dict[str, Any]) -> FinishedRow:
    """Return the answers to a line's questions: yes for long inputs."""
    share = 0.75 if len(line["body"]["input"]) > len("text: bad") else 0.25
    answer = {"type": "predicate", "name": "good", "probability": share}
    usage = {"input_tokens": 3, "output_tokens": 0, "total_tokens": 3}
    diagnostics = {"name": "good", "label_mass": 0.5, "argmax_is_label": True}
    body = {"answers": [answer], "usage": usage, "diagnostics": [diagnostics]}
    response = {"status_code": 200, "request_id": "r", "body": body}
    row = {"id": "x", "custom_id": line["custom_id"], "response": response, "error": None}
    return FinishedRow(number, to_json(row) + b"\n", is_success=True, usage=Usage(3))


CASCADE = (
    b"ask = ['good: Is it good?']\nkeep = ['text']\nprompt = 'text: {{ text }}'\n"
    b"params = {model = '%b'}\nescalate = 'large'\nescalate_below = 0.8\n"
)


def test_a_dropped_table_may_have_a_second_model(
    ministack: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its recipe or its options name it; the table names the model of each row."""
    monkeypatch.setattr(f"{__name__}.row_of", decision_of)
    cloud = Cloud.on(ministack, MODEL, "large")
    recipe = CASCADE % MODEL.encode()
    batch = drop(cloud, comma_separated(REVIEWS), "input/decided.csv", recipe)
    assert batch.escalation == Escalation("large", "large", 0.8)
    ended = finished(cloud, published(cloud, batch))
    made = csv.read_csv(io.BytesIO(table_of(cloud, ended)))
    assert made.schema.names[-3:] == ["error", "model", "escalation_error"]
    plain = recipe.partition(b"escalate")[0]
    cloud.put(plain, "input/plain.recipe.toml")
    options = {"escalate": "large", "escalate-below": "0.9"}
    other = cloud.ingest(cloud.create(comma_separated(REVIEWS), "input/plain.csv", options))
    assert other.escalation == Escalation("large", "large", 0.9)
    learning = recipe.replace(b"escalate_below = 0.8", b"target_accuracy = 0.8\ngold = 'known'")
    learning = learning.replace(b"'text']", b"'text', 'known']") + b"escalate_by = 'chat'\n"
    known = pa.table({"text": ["x"] * 10, "known": ["yes"] * 10})
    batch = drop(cloud, parquet(known), "input/learnt.parquet", learning)
    assert batch.escalation == Escalation("large", "large", target=0.8, by="chat")
    ended = finished(cloud, published(cloud, batch))
    made = pq.read_table(io.BytesIO(table_of(cloud, ended)))
    assert made.schema.names[:4] == ["text", "known", "good", "good_confidence"]


@pytest.mark.parametrize(
    ("model", "change", "words"),
    [
        (MODEL, (b"'large'", b"'huge'"), "`escalate` is 'huge', which is not a served model: use"),
        ("large", (b"", b""), "`escalate` is 'large', the model of the requests: use another one"),
        (MODEL, (b"0.8", b"8"), "`escalate` needs either `escalate_below` or `target_accuracy`, a"),
        (
            MODEL,
            (b"escalate_below", b"target_accuracy"),
            "`target_accuracy` needs `gold`, the col",
        ),
        (
            MODEL,
            (b"keep = ['text']", b"gold = 'text'"),
            "`escalate` cannot be combined with `gold` in a deployment without `target_accuracy`",
        ),
        (
            MODEL,
            (b"keep = ['text']\n", b"gold = 'known'\ntarget_accuracy = 0.9\n#"),
            "column `known` has 4 gold answers to `good`: at least 10 are required",
        ),
    ],
)
def test_an_unsuitable_second_model_is_refused(
    ministack: Emulator, model: str, change: tuple[bytes, bytes], words: str
) -> None:
    """No line runs; the error is one sentence."""
    cloud = Cloud.on(ministack, MODEL, "large")
    recipe = (CASCADE % model.encode()).replace(*change, 1)
    if b"target_accuracy = 0.9" in recipe:
        recipe = recipe.replace(b"escalate_below = 0.8\n", b"")
    table = REVIEWS.append_column("known", pa.array(["yes", "no", "no", "yes"]))
    batch = drop(cloud, comma_separated(table), "input/decided.csv", recipe)
    assert batch.status is Status.FAILED
    assert words in batch.errors[0].message


def test_a_second_model_must_decide(ministack: Emulator) -> None:
    """Its workers have recorded their endpoints; requests other than decisions have none."""
    cloud = Cloud.on(ministack, MODEL, "large")
    cloud.run(cloud.deployment.fleets.put_endpoints("large", ["/v1/embeddings"]))
    recipe = CASCADE % MODEL.encode()
    batch = drop(cloud, comma_separated(REVIEWS), "input/decided.csv", recipe)
    assert "which does not support /v1/decisions: use a chat model" in batch.errors[0].message
    options = {"escalate": "large", "escalate-below": "0.9"}
    chats = cloud.ingest(cloud.create(lines_of(2), "input/chats.jsonl", options))
    assert "but the first one is for /v1/chat/completions" in chats.errors[0].message
    body = {"model": MODEL, "input": "x", "questions": [QUESTION]}
    line = {"custom_id": "1", "url": DECISIONS, "body": body}
    target = {"escalate": "large", "target-accuracy": "0.9"}
    cloud.run(cloud.deployment.fleets.put_endpoints("large", [DECISIONS]))
    file = cloud.ingest(cloud.create(to_json(line) + b"\n", "input/file.jsonl", target))
    assert "which only a table with `gold` has: use `escalate_below`" in file.errors[0].message
    by_chat = {**options, "escalate-by": "chat"}
    file = cloud.ingest(cloud.create(to_json(line) + b"\n", "input/file.jsonl", by_chat))
    assert "does not support /v1/chat/completions: use a chat model" in file.errors[0].message
    unknown = cloud.create(lines_of(2), "input/x.jsonl", {**options, "escalate": "huge"})
    assert "'huge', which is not a served model" in cloud.ingest(unknown).errors[0].message


def test_questions_about_a_dropped_table_are_columns_of_it(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch's report has the distribution of the answers."""
    monkeypatch.setattr(f"{__name__}.row_of", decision_of)
    recipe = b"ask = ['good: Is it good?']\nkeep = ['text']\nprompt = 'text: {{ text }}'\n"
    batch = drop(mini, parquet(REVIEWS), "input/decided.parquet", recipe)
    assert batch.endpoint == "/v1/decisions"
    ended = finished(mini, published(mini, batch))
    assert (ended.status, ended.errors) == (Status.COMPLETED, ())
    made = pq.read_table(io.BytesIO(table_of(mini, ended)))
    assert made.schema.names[:3] == ["text", "good", "good_confidence"]
    assert made["good"].to_pylist() == [False, True, True, True]
    report = from_json(mini.run(mini.deployment.bucket.get(ended.outputs.report_key)))
    [question] = report["tidemill"]["questions"]
    assert question["values"] == {"true": 3, "false": 1}


def test_a_dropped_table_is_calibrated_by_its_recipe(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The raw probabilities stay next to the calibrated ones, and the report is brief."""
    monkeypatch.setattr(f"{__name__}.row_of", decision_of)
    recipe = b"ask = 'good: Is it good?'\nprompt = 'text: {{ text }}'\nkeep = ['text']\n"
    recipe += b"calibrate = 'batch'\nprior = '0.2'\n"
    batch = drop(mini, parquet(REVIEWS), "input/calibrated.parquet", recipe)
    ended = finished(mini, published(mini, batch))
    assert (ended.status, ended.errors) == (Status.COMPLETED, ())
    made = pq.read_table(io.BytesIO(table_of(mini, ended)))
    assert made["good"].to_pylist() == [False, False, False, False]
    raw = [row["true"] for row in made["good_raw_probabilities"].to_pylist()]
    assert raw == [0.25, 0.75, 0.75, 0.75]
    assert made["calibrated"].to_pylist() == [True] * 4
    report = from_json(mini.run(mini.deployment.bucket.get(ended.outputs.report_key)))
    [question] = report["tidemill"]["questions"]
    assert question["calibration"]["fitted_rows"] == 4


_ASK_GOOD = b"ask = 'good: Is it good?'\nprompt = 'text: {{ text }}'\n"


def saved_calibration(num_options: int = 2) -> dict[str, Any]:
    """Return a calibration with the prior 0.2 instead of even."""
    made = {"scale": 1.0, "offsets": [-1.386, *[0.0] * (num_options - 1)]}
    question = {"name": "good", "kind": "predicate", "options": ["true", "false"]}
    question |= {"method": "batch", "rows": 40, "map": made}
    settings = {"--prompt": "text: {{ text }}", "--question-layout": "questions_first"}
    body = {"type": "predicate", "name": "good", "instructions": "Is it good?"}
    settings |= {"--ask": [body], "--model": {"name": "m", "digest": None}}
    head = {"object": "decision.calibration", "version": 1}
    return {**head, "settings": settings, "questions": [question]}


@pytest.mark.parametrize("way", ["gold", "measured", "file", "metadata", "inline"])
def test_a_dropped_table_is_calibrated_by_gold_answers_or_a_saved_calibration(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A saved calibration is a file next to the table, or in the recipe itself."""
    monkeypatch.setattr(f"{__name__}.row_of", decision_of)
    texts = ["bad", "so, so"] * 6
    data = parquet(pa.table({"text": texts, "label": [len(text) > 3 for text in texts]}))
    mini.put(to_json(saved_calibration()), "input/my.calibration.json")
    more = {
        "gold": "gold = 'label'\n",
        "measured": "calibrate = 'batch'\nprior = '0.2'\ngold = 'label'\n",
        "file": "calibration = 'my.calibration.json'\n",
        "metadata": "",
        "inline": print_recipe({"calibration": saved_calibration()}),
    }
    if way == "metadata":
        own = {"recipe-ask": '"good: Is it good?"', "recipe-prompt": "text: {{ text }}"}
        own |= {"recipe-calibration": "my.calibration.json"}
        batch = mini.ingest(mini.create(data, f"input/{way}.parquet", own))
    else:
        batch = drop(mini, data, f"input/{way}.parquet", _ASK_GOOD + more[way].encode())
    assert batch.errors == ()
    ended = finished(mini, published(mini, batch))
    assert (ended.status, ended.errors) == (Status.COMPLETED, ())
    made = pq.read_table(io.BytesIO(table_of(mini, ended)))
    assert made["calibrated"].to_pylist() == [True] * 12
    assert made["good_raw_probabilities"].to_pylist()[0]["true"] == 0.25
    report = from_json(mini.run(mini.deployment.bucket.get(ended.outputs.report_key)))
    calibration = report["tidemill"]["questions"][0]["calibration"]
    share = made["good_probabilities"].to_pylist()[1]["true"]
    if way == "gold":
        assert share > 0.75
        assert (calibration["method"], calibration["gold_rows"]) == ("platt", 12)
        assert calibration["after"]["accuracy"] == 1.0
    elif way == "measured":
        assert calibration["before"]["accuracy"] == 1.0
    else:
        assert share == pytest.approx(3 / 7, abs=0.001)


@pytest.mark.parametrize(
    ("calibration", "words"),
    [
        (b"", "`calibration` c.calibration.json cannot be used: it is empty"),
        (b"{", "is not a complete JSON document"),
        (b" " * 2**21, "is longer than 1,048,576 bytes"),
        (to_json(saved_calibration(9000)), "a damaged calibration of decisions"),
        (to_json(saved_calibration()).replace(b"Is it good", b"Is it bad"), "another `ask`"),
        (to_json(saved_calibration()).replace(b'name":"good', b'name":"god'), "no question `good`"),
        (None, "c.calibration.json, but input/t.c.calibration.json does not exist"),
    ],
)
def test_an_unsuitable_calibration_of_a_drop_is_refused_in_one_sentence(
    mini: Cloud, calibration: bytes | None, words: str
) -> None:
    """A missing file may come a moment later."""
    if calibration is not None:
        mini.put(calibration, "input/c.calibration.json")
    name = "c.calibration.json" if calibration is not None else "t.c.calibration.json"
    mini.put(_ASK_GOOD + f"calibration = '{name}'\n".encode(), "input/t.recipe.toml")
    batch = mini.create(parquet(REVIEWS), "input/t.parquet")
    if calibration is None:
        assert mini.ingest(batch).status is Status.VALIDATING
    refused = mini.ingest(batch, now=lambda: time.time() + 90)
    assert refused.status is Status.FAILED
    assert words in refused.errors[0].message


class Form(NamedTuple):
    """A table format: how to write one, additional settings of its recipe, and the result."""

    name: str
    written: Callable[[pa.Table], bytes]
    recipe: bytes
    key: str
    read: Callable[[Any], pa.Table]


FORMS = [
    Form("r.csv", comma_separated, b"", "output/r.csv", csv.read_csv),
    Form("r.csv.gz", comma_separated, b"", "output/r.csv.gz.table.csv", csv.read_csv),
    Form("r.arrow", arrow, b"", "output/r.arrow", lambda file: ipc.open_file(file).read_all()),
    Form("r.jsonl", json_lines, b"output = 'parquet'\n", "output/r.table.parquet", pq.read_table),
    Form(
        "r.tsv", comma_separated, b"output = 'jsonl'\n", "output/r.tsv.table.ndjson", json.read_json
    ),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_every_format_goes_in_and_out(mini: Cloud, form: Form) -> None:
    """The first bytes decide the format, whatever the name; names of results never collide."""
    data = form.written(REVIEWS)
    packed = gzip.compress(data) if form.name.endswith(".gz") else data
    batch = drop(mini, packed, f"input/{form.name}", form.recipe + RECIPE)
    assert (batch.errors, batch.outputs.table_key) == ((), form.key)
    ended = finished(mini, published(mini, batch))
    assert ended.outputs.output_key != form.key
    made = form.read(io.BytesIO(table_of(mini, ended)))
    assert made["text"].to_pylist() == REVIEWS["text"].to_pylist()
    assert made["output_text"].to_pylist()[0] == "LABEL: BAD"


def test_every_cell_has_its_value_in_the_table(mini: Cloud) -> None:
    """Types that CSV has no words for are texts, in the prompt and in the table."""
    times = [{"at": 1, "took": 1500}] * 4
    kind = pa.struct([("at", pa.timestamp("ns")), ("took", pa.duration("ms"))])
    table = REVIEWS.append_column("when", pa.array(times, kind))
    table = table.append_column("gap", pa.array([pa.MonthDayNano([1, 2, 3])] * 4))
    table = table.append_column("data", pa.array([b"\xff>?"] * 4))
    recipe = b"prompt = '{{ when.took }} {{ gap }}'\noutput = 'csv'\n"
    batch = drop(mini, arrow(table), "input/r.arrow", recipe)
    assert batch.errors == ()
    made = csv.read_csv(io.BytesIO(table_of(mini, finished(mini, published(mini, batch)))))
    assert made["when"][0].as_py() == '{"at":"1970-01-01 00:00:00.000000001","took":"PT1.5S"}'
    assert made["data"].to_pylist() == ["/z4/"] * 4
    assert made["gap"].to_pylist() == ["P1M2DT0.000000003S"] * 4
    assert made["output_text"][0].as_py() == "PT1.5S P1M2DT0.000000003S"


def test_metadata_is_a_recipe_too_and_takes_the_place_of_the_file(mini: Cloud) -> None:
    """The metadata names are specific, so that no other metadata is taken for a recipe."""
    own = {"id": "7", "recipe-prompt": "{{ text }}!", "recipe-keep": "text, stars"}
    params = {"recipe-params": '{"temperature": 0}'}
    mini.put(RECIPE, "input/x.recipe.toml")
    batch = mini.ingest(mini.create(parquet(REVIEWS), "input/x.parquet", own | params))
    first = from_json(mini.run(mini.deployment.bucket.get(batch.source.key)).splitlines()[0])
    assert first["custom_id"] == "1"
    assert first["body"] == {"messages": [{"role": "user", "content": "bad!"}], "temperature": 0}
    assert batch.options.metadata == {"id": "7"}
    made = pq.read_table(io.BytesIO(table_of(mini, finished(mini, published(mini, batch)))))
    assert made.schema.names[:2] == ["text", "stars"]


def test_a_recipe_and_a_calibration_create_no_batch(mini: Cloud) -> None:
    """The daily sweep does not find them either."""
    for name in ("input/x.recipe.toml", "input/x.calibration.json"):
        upload = mini.put(RECIPE, name)
        assert mini.run(create_batch_of_drop(mini.deployment, upload, int(time.time()))) is None
    mini.run(sweep(mini.deployment, "", int(time.time()) + 3600, plenty))
    sent = mini.run(
        mini.deployment.drops.receive(max_messages=10, wait_seconds=0, visibility_seconds=9)
    )
    assert [each.body for each in sent if "kind" in each.body] == []


def test_a_recipe_may_come_a_moment_later(mini: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a folder is uploaded, the table is checked again later, and then refused."""
    monkeypatch.setattr(intake, "_WAIT_SECONDS", 0.0)
    batch = mini.ingest(mini.create(parquet(REVIEWS), "input/x.parquet"))
    assert batch.status is Status.VALIDATING
    assert mini.messages(mini.deployment.intake)
    mini.put(RECIPE, "input/x.recipe.toml")
    assert mini.ingest(batch).status is Status.IN_PROGRESS
    other = mini.create(parquet(REVIEWS), "input/y.parquet")
    refused = mini.ingest(other, now=lambda: time.time() + 30)
    assert refused.status is Status.FAILED
    assert "recipe next to it (NAME.recipe.toml)" in refused.errors[0].message


@pytest.mark.parametrize(
    ("data", "recipe", "code", "words"),
    [
        (parquet(REVIEWS), b"prompt = '{{ txet }}'", "invalid_recipe", "did you mean `text`?"),
        (parquet(REVIEWS), b"promt = '{{ text }}'", "invalid_recipe", "did you mean `prompt`?"),
        (parquet(REVIEWS), b"prompt = ", "invalid_recipe", "not valid TOML"),
        (parquet(REVIEWS), b"", "invalid_recipe", "it has no template"),
        (parquet(REVIEWS), b"prompt = '\xff'", "invalid_recipe", "not UTF-8"),
        (parquet(REVIEWS), b"#" * 70_000 + b"\n" + RECIPE, "invalid_recipe", "65,536 bytes"),
        (
            arrow(pa.table({"text": ["a"], "gap": pa.array([pa.MonthDayNano([1, 2, 3])])})),
            b"prompt = '{{ text }}'\noutput = 'parquet'",
            "invalid_recipe",
            "column `gap` is month_day_nano_interval, which Parquet does not support",
        ),
        (
            parquet(pa.table({"at": pa.array([1], pa.timestamp("ms", "UTC")).cast(FAR)})),
            b"prompt = '{{ at }}'",
            "invalid_recipe",
            "column `at` is timestamp[ms, tz=Mars/Phobos], and this machine does not know",
        ),
        (parquet(REVIEWS)[:-9], RECIPE, "invalid_table", "damaged or truncated"),
        (b"PAR1", RECIPE, "invalid_table", "damaged or truncated"),
        (b"a,text\n1,x\n2\n", b"prompt = '{{ text }}'", "invalid_table", "Row 2 (line 3)"),
        (b'text\n"x\n', b"prompt = '{{ text }}'", "invalid_table", "CSV"),
        (
            parquet(pa.table({"text": ["a", None]})),
            b"prompt = '{{ text }}'",
            "invalid_cell",
            "null",
        ),
        (
            parquet(pa.table({"text": ["a", "b"], "n": [1, 1]})),
            b"prompt = '{{ text }}'\nid = 'n'",
            "duplicate_custom_id",
            "used in row 1",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_are_reported_before_anything_runs(
    mini: Cloud, data: bytes, recipe: bytes, code: str, words: str
) -> None:
    """They have the row and the column; nothing is left behind."""
    batch = drop(mini, data, "input/x.parquet", recipe)
    assert (batch.status, batch.errors[0].code) == (Status.FAILED, code)
    assert words in batch.errors[0].message
    uploads = mini.aws.clients["s3"].list_multipart_uploads(Bucket=mini.bucket)
    assert not uploads.get("Uploads")


def test_a_long_table_is_made_by_several_requests_of_s3(
    ministack: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows over many parts, read in ranges, are those that went in."""
    mini = Cloud.on(ministack)
    monkeypatch.setattr(upload_results, "_PART_BYTES", 5 * 2**20)
    text = [hashlib.sha512(str(n).encode()).hexdigest() * 40 for n in range(2500)]
    table = pa.table({"n": list(range(2500)), "text": text})
    batch = drop(mini, parquet(table), "input/x.parquet", b"prompt = '{{ n }}'")
    ended = finished(mini, published(mini, batch))
    made = pq.read_table(io.BytesIO(table_of(mini, ended)))
    assert made.select(["n", "text"]).equals(table)
    assert made["output_text"].to_pylist()[2499] == "2499"


@pytest.mark.parametrize("outcome", ["expired", "cancelled"])
def test_a_batch_that_ends_early(mini: Cloud, outcome: str) -> None:
    """An expired one has a table in which rows say that they were not run; a cancelled one none."""
    table = pa.table({"text": [str(n) for n in range(20)]})
    batch = drop(mini, parquet(table), "input/x.parquet", b"prompt = '{{ text }}'")
    run_shards(mini, batch, [0])
    if outcome == "cancelled":
        mini.run(cancel(mini.deployment, batch.id, int(time.time())))
        ended = finished(mini, mini.batch(batch.id))
        assert (ended.status, ended.table_file_id) == (Status.CANCELLED, None)
        assert ended.is_table
        return
    ended = finished(mini, published(mini, batch, "expired"))
    assert ended.status is Status.EXPIRED
    made = pq.read_table(io.BytesIO(table_of(mini, ended)))
    errors = made["error"].to_pylist()
    assert [at for at, error in enumerate(errors) if error is None] == [0, *range(2, 10)]
    assert "completion window" in errors[-1]


@pytest.mark.parametrize("stride", with_long([5], [1]))
def test_a_run_may_die_at_any_moment(mini: Cloud, stride: int) -> None:
    """Killed between any two of its requests, another one makes the very same table."""
    batch = published(mini, drop(mini, parquet(REVIEWS), "input/x.parquet"))
    change, tables = mini.deployment.table.change_batch, []
    was_killed = True
    while was_killed:
        mini.run(change(batch.id, batch.status, table_file_id=None, table_tries=0))
        mini.run(mini.deployment.bucket.delete(batch.outputs.table_key or ""))
        run = partial(make_table, mini.aws, mini.deployment, batch.id, plenty)
        was_killed = is_killed_after(stride * len(tables), mini.aws, run)
        mini.run(change(batch.id, batch.status, turn_until=0))
        run()
        assert mini.batch(batch.id).table_file_id is not None
        tables.append(table_of(mini, batch))
    assert stride * len(tables) > 15
    assert set(tables) == {tables[0]}
    assert finished(mini, batch).status is Status.COMPLETED


def test_a_table_that_cannot_be_made_leaves_the_rows(mini: Cloud) -> None:
    """After some failed runs the batch ends without a table, and its errors give the reason."""
    batch = published(mini, drop(mini, parquet(REVIEWS), "input/x.parquet"))

    def no_time() -> float:
        return 0.0

    for _ in range(MAX_TRIES):
        make_table(mini.aws, mini.deployment, batch.id, no_time)
        assert mini.messages() == [{"kind": "advance", "batch_id": batch.id}]
    make_table(mini.aws, mini.deployment, batch.id, plenty)
    ended = finished(mini, batch)
    assert (ended.status, ended.outputs.table_key) == (Status.COMPLETED, None)
    [error] = ended.errors
    assert error.code == "table_not_made"
    assert "Its rows are in output/x.parquet.jsonl" in error.message
    uploads = mini.aws.clients["s3"].list_multipart_uploads(Bucket=mini.bucket)
    assert not uploads.get("Uploads")


def test_an_input_that_is_gone_leaves_the_rows(mini: Cloud) -> None:
    """Its columns can no longer be joined to them."""
    batch = published(mini, drop(mini, parquet(REVIEWS), "input/x.parquet"))
    gone = {"Bucket": mini.bucket, "Key": batch.input.key, "VersionId": batch.input.version_id}
    mini.aws.clients["s3"].delete_object(**gone)
    ended = finished(mini, batch)
    assert (ended.status, ended.errors[0].code) == (Status.COMPLETED, "table_not_made")


def of_the_api(cloud: Cloud, data: bytes, recipe: dict[str, Any], **options: Any) -> Batch:
    """Create a batch of a file and a recipe by the API, and take it in."""
    cloud.put(data, "files/lab/file-1")
    file = File("file-1", "lab", "files/lab/file-1", len(data), 1, "x.csv", "batch")
    cloud.run(cloud.deployment.files.put_file(file))
    url = "/v1/decisions" if "ask" in recipe else "/v1/chat/completions"
    request = {"input_file_id": "file-1", "endpoint": url, "recipe": recipe, **options}
    now = int(time.time())
    made = cloud.run(create_batch(cloud.deployment, "lab", parse_request(request), now))
    return cloud.ingest(made)


def test_a_table_of_the_api_comes_back_as_one(mini: Cloud) -> None:
    """The request contains the recipe, and the batch has a file with the table."""
    recipe = {"prompt": "Label: {{ text }}", "id": "review_id"}
    batch = of_the_api(mini, comma_separated(REVIEWS), recipe)
    ended = finished(mini, published(mini, batch))
    assert (ended.status, ended.tenant, ended.num_rows) == (Status.COMPLETED, "lab", 4)
    rows = csv.read_csv(io.BytesIO(table_of(mini, ended))).to_pylist()
    assert [row["review_id"] for row in rows] == ["a", "b", "c", "d"]
    assert rows[0]["output_text"] == "LABEL: BAD"
    assert ended.table_file_id is not None
    file = mini.run(mini.deployment.files.get_file(ended.table_file_id))
    assert file is not None
    assert file.tenant == "lab"


def test_a_table_of_the_api_may_have_a_learnt_threshold(
    ministack: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch's options name the second model, and its recipe the column of known answers."""
    monkeypatch.setattr(f"{__name__}.row_of", decision_of)
    cloud = Cloud.on(ministack, MODEL, "large")
    known = pa.table({"text": ["x"] * 10, "known": ["yes"] * 10})
    recipe = {"ask": ["good: Is it good?"], "gold": ["known"], "output": "csv"}
    recipe |= {"prompt": "text: {{ text }}", "params": {"model": MODEL}}
    options = {"escalate": "large", "target_accuracy": 0.8}
    batch = of_the_api(cloud, comma_separated(known), recipe, **options)
    assert batch.escalation == Escalation("large", "large", target=0.8)
    ended = finished(cloud, published(cloud, batch))
    made = csv.read_csv(io.BytesIO(table_of(cloud, ended)))
    assert made.schema.names[-3:] == ["error", "model", "escalation_error"]


def test_a_recipe_for_a_file_of_requests_is_refused(mini: Cloud) -> None:
    """It would have no effect."""
    batch = of_the_api(mini, lines_of(2), {"prompt": "hi"})
    assert (batch.status, batch.errors[0].code) == (Status.FAILED, "invalid_recipe")
    assert "remove `recipe`" in batch.errors[0].message
