"""Batches whose intake raises, and hostile tables: they end as `failed` and do not stay."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.emulators import Emulator
from tests.handler.intake.rig import Cloud, lines_of, plenty
from tidemill.batch.states import Status
from tidemill.handler.errors import AwsError
from tidemill.handler.inputs import table_lines
from tidemill.handler.intake import intake, work_units
from tidemill.handler.intake.control_messages import IntakeStep
from tidemill.handler.intake.work_units import run_unit


@pytest.mark.parametrize("where", ["_get_progress", "_ensure_jsonl"])
def test_a_file_that_fails_three_runs_fails_with_the_reason(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A fault of ours ends the batch at its third run instead of keeping it `validating`."""
    monkeypatch.setattr(intake, where, lambda *_, **__: 1 // 0)
    batch = mini.create(lines_of(2))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            mini.ingest(batch)
        assert mini.batch(batch.id).status is Status.VALIDATING
    batch = mini.ingest(batch)
    assert (batch.status, batch.num_errors) == (Status.FAILED, 1)
    assert "in 3 attempts: ZeroDivisionError: integer division" in batch.errors[0].message


def test_an_outage_of_aws_fails_no_file(mini: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of AWS's services are not counted, however many runs they end."""

    def out_of_order(*_: object, **__: object) -> None:
        raise AwsError("s3 get_object: SlowDown")

    batch = mini.create(lines_of(2))
    with monkeypatch.context() as patched:
        patched.setattr(intake, "_ensure_jsonl", out_of_order)
        for _ in range(5):
            with pytest.raises(AwsError):
                mini.ingest(batch)
    assert mini.ingest(batch).status is Status.IN_PROGRESS


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("{% for a in text %}" * 25 + "{% endfor %}" * 25, "cannot be compiled: it is nested too"),
        ("{{ " + "(" * 900 + "1" + ")" * 900 + " }}", "cannot be compiled: it is nested too deep"),
        ("{{ row['" + "x" * 1_900 + "'] }}", "which is not a column of the table: it has text."),
    ],
    ids=["blocks", "parentheses", "a long name"],
)
def test_a_table_with_a_hostile_recipe_fails_with_a_sentence(
    mini: Cloud, prompt: str, words: str
) -> None:
    """The batch of a dropped table does not stay `validating`."""
    batch = mini.ingest(mini.create(b"text\nhi\n", "input/x.csv", {"recipe-prompt": prompt}))
    assert batch.status is Status.FAILED
    assert words in batch.errors[0].message
    assert len(batch.errors[0].message) < 2_100


def test_a_recipe_sets_the_priority_of_its_batch(mini: Cloud) -> None:
    """The order of the tenant's batches follows; an option of the upload takes precedence."""
    recipe = b"prompt = '{{ text }}'\npriority = -7"
    for name in ("first", "given", "zero"):
        mini.put(recipe, f"input/{name}.recipe.toml")
    first = mini.ingest(mini.create(b"text\nhi\n", "input/first.csv"))
    given = mini.ingest(mini.create(b"text\nhi\n", "input/given.csv", {"priority": "3"}))
    zero = mini.ingest(mini.create(b"text\nhi\n", "input/zero.csv", {"priority": "0"}))
    batches = (first, given, zero)
    assert [batch.priority for batch in batches] == [-7, 3, 0]
    places = mini.run(mini.deployment.overview.list_places(first.tenant))
    assert [places[batch.id].priority for batch in batches] == [-7, 3, 0]
    mini.put(recipe.replace(b"-7", b"1.5"), "input/bad.recipe.toml")
    echoing = mini.create(b"text\nhi\n", "input/first.csv", {"echo-fields": "text"})
    words = "`echo_fields` is not supported for tables: `keep` of the recipe copies columns"
    assert words in mini.ingest(echoing).errors[0].message
    bad = mini.ingest(mini.create(b"text\nhi\n", "input/bad.csv"))
    words = "`priority` is 1.5: it must be an integer between -100 and 100"
    assert words in bad.errors[0].message


def test_a_recipe_file_that_is_nested_too_deeply_fails_the_batch(mini: Cloud) -> None:
    """A recipe of 2 kB next to a table ends the batch at the first run."""
    nested = b"prompt = '{{ text }}'\nparams.x = " + b"[" * 900 + b"]" * 900
    mini.put(nested, "input/x.recipe.toml")
    batch = mini.ingest(mini.create(b"text\nhi\n", "input/x.csv"))
    assert (batch.status, batch.errors[0].code) == (Status.FAILED, "invalid_recipe")
    assert "it is nested too deeply" in batch.errors[0].message


def test_more_rows_than_runs_can_render_are_refused_by_the_footer(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row is rendered."""
    monkeypatch.setattr(table_lines, "MAX_ROWS", 2)
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": ["a", "b", "c"]}), sink)
    metadata = {"recipe-prompt": "{{ text }}"}
    batch = mini.ingest(mini.create(sink.getvalue(), "input/x.parquet", metadata))
    assert batch.errors[0].message == ("The table has 3 rows, more than 2: split it into several.")


def test_a_unit_that_fails_three_times_fails_its_batch(
    ministack: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of several units ends as one of a single unit does."""
    cloud = Cloud.on(ministack, shard_lines="10", range_bytes="1000")
    batch = cloud.ingest(cloud.create(lines_of(50)))
    assert batch.status is Status.VALIDATING
    unit = IntakeStep(batch.id, cloud.messages(cloud.deployment.intake)[0]["unit"])
    monkeypatch.setattr(work_units._UnitRun, "_do", lambda *_: 1 // 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            run_unit(cloud.aws, cloud.deployment, unit, plenty)
    run_unit(cloud.aws, cloud.deployment, unit, plenty)
    failed = cloud.batch(batch.id)
    assert failed.status is Status.FAILED
    assert "in 3 attempts: ZeroDivisionError" in failed.errors[0].message
