"""Object keys: each result is next to its upload, and no part of a request is a path."""

from __future__ import annotations

from dataclasses import astuple
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.batch.errors import InvalidOption
from tidemill.batch.object_keys import (
    batch_id_of_drop,
    batch_id_of_request,
    check_tenant,
    file_key,
    invalid_key_reason,
    invalid_tenant_reason,
    is_drop,
    is_folder,
    outputs_of_drop,
    outputs_of_request,
    part_key,
    part_prefix,
    results_name,
    segment_key,
    table_key,
    tenant_of_drop,
    work_prefix,
)


@given(st.text(min_size=1, max_size=40))
def test_results_are_next_to_each_other_under_output(stem: str) -> None:
    """Any name keeps its path, including dots: S3 keys are not paths."""
    outputs = outputs_of_drop(f"input/{stem}.jsonl")
    if "\ud800" <= max(stem) <= "\udfff":
        return
    assert outputs is not None
    assert outputs.output_key == f"output/{stem}.jsonl"
    assert outputs.error_key == f"output/{stem}.errors.jsonl"
    assert outputs.report_key == f"output/{stem}.batch.json"


@pytest.mark.parametrize("key", ["x.jsonl", "output/x.jsonl", "input/", "", "inputx.jsonl"])
def test_other_keys_are_not_uploads(key: str) -> None:
    """Keys that the notification rules let through by mistake create no batch."""
    assert outputs_of_drop(key) is None


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("x.jsonl", "x"),
        ("x.jsonl.gz", "x.jsonl.gz"),
        ("X.JSONL", "X.JSONL"),
        ("a/data.csv", "a/data.csv"),
        ("x", "x"),
        (".jsonl", ".jsonl"),
        ("a/", "a/"),
    ],
)
def test_results_of_any_name_are_named(name: str, stem: str) -> None:
    """A file in another format keeps its whole name, so that it never shares its results."""
    outputs = outputs_of_drop(f"input/{name}")
    assert outputs is not None
    assert outputs.output_key == f"output/{stem}.jsonl"
    assert outputs.report_key == f"output/{stem}.batch.json"
    assert results_name(outputs) == f"input/{stem}.jsonl"
    assert is_drop(outputs)
    assert invalid_key_reason(f"input/{name}") is None


LONG = ("x" * 1004, "parquet")
NAMES = [
    "x",
    "x.jsonl",
    "x.jsonl.gz",
    "x.json",
    "x.batch",
    "x.jsonl.jsonl",
    "X.JSONL",
]


@pytest.mark.parametrize(("one", "other"), list(combinations(NAMES, 2)))
def test_two_uploads_share_all_their_results_or_none(one: str, other: str) -> None:
    """Only `NAME` and `NAME.jsonl` count as one name."""
    keys = [outputs_of_drop(f"input/{name}") for name in (one, other)]
    first, second = ({*astuple(outputs)} - {None} for outputs in keys if outputs is not None)
    is_one = (one, other) == ("x", "x.jsonl")
    assert (first == second) == is_one
    assert first.isdisjoint(second) != is_one


@pytest.mark.parametrize(
    ("name", "form", "key"),
    [
        ("x.parquet", "parquet", "x.parquet"),
        ("x.parquet", "csv", "x.parquet.table.csv"),
        ("x.csv.gz", "csv", "x.csv.gz.table.csv"),
        ("x.jsonl", "jsonl", "x.table.ndjson"),
        ("x.ndjson", "jsonl", "x.ndjson"),
    ],
)
def test_a_table_has_a_unique_name(name: str, form: str, key: str) -> None:
    """An upload whose table would have the name of another's is refused."""
    outputs = outputs_of_drop(f"input/{name}")
    assert outputs is not None
    assert table_key(outputs, form) == f"output/{key}"
    assert f"output/{key}" not in astuple(outputs)
    for other, its_form in ((f"x.table.{form.replace('jsonl', 'ndjson')}", form), LONG):
        outputs = outputs_of_drop(f"input/{other}")
        assert outputs is not None
        with pytest.raises(InvalidOption, match="name"):
            table_key(outputs, its_form)


@pytest.mark.parametrize("name", ["x.errors.jsonl", "x.errors", "a/.errors"])
def test_no_upload_can_have_the_name_of_errors(name: str) -> None:
    """Its rows would overwrite the errors of another file."""
    assert "rename the upload" in (invalid_key_reason(f"input/{name}") or "")


def test_names_are_limited_as_in_s3() -> None:
    """The longest of the results' names has 1,024 bytes of UTF-8."""
    room = 1024 - len("output/.errors.jsonl")
    for short in (f"{'x' * room}.jsonl", "x" * room):
        assert invalid_key_reason(f"input/{short}") is None
    for long in (f"{'x' * (room + 1)}.jsonl", f"{'é' * (room // 2 + 1)}.jsonl", "x" * 1018):
        assert "The name is too long" in (invalid_key_reason(f"input/{long}") or "")
        outputs = outputs_of_drop(f"input/{long}")
        assert outputs is not None
        assert len(outputs.error_key) < 100


@pytest.mark.parametrize(
    ("key", "tenant"),
    [
        ("input/x.jsonl", "default"),
        ("input/default/x.jsonl", "default"),
        ("input/a@b.c/x.jsonl", "a@b.c"),
        ("input/a/../b/x.jsonl", "a"),
        ("input//x.jsonl", None),
        ("input/../b/x.jsonl", None),
        (f"input/{'n' * 65}/x.jsonl", None),
    ],
)
def test_the_first_folder_is_the_tenant(key: str, tenant: str | None) -> None:
    """It must be a valid name; S3 keys are not paths."""
    assert tenant_of_drop(key) == (tenant or "default")
    assert (invalid_tenant_reason(key) is None) is (tenant is not None)


def test_folder_markers_are_empty_objects() -> None:
    """Consoles create them."""
    assert is_folder("input/a/", 0)
    assert not is_folder("input/a/", 1)
    assert not is_folder("input/a", 0)


def test_an_id_belongs_to_one_upload() -> None:
    """It is the same for the same upload, and no two ways of joining the parts collide."""
    words = ["", "a", "b", "ab", "a/b"]
    ids = [batch_id_of_drop(*each) for each in product(words, repeat=3)]
    ids += [batch_id_of_request(*each) for each in product(words, repeat=2)]
    assert len(set(ids)) == len(ids)
    assert batch_id_of_drop("a", "b", "c") == batch_id_of_drop("a", "b", "c")


def test_work_is_ordered_under_its_batch() -> None:
    """Parts list in the order of fences and numbers, separate from other shards and segments."""
    keys = [part_key("b", 1, fence, number) for fence in (1, 2, 10) for number in (0, 9, 10)]
    assert keys == sorted(keys)
    assert all(key.startswith(part_prefix("b", 1)) for key in keys)
    assert not part_key("b", 10, 1, 0).startswith(part_prefix("b", 1))
    assert not segment_key("b", 1, 1, "output", 0).startswith(part_prefix("b", 1))
    assert part_prefix("b", 1).startswith(work_prefix("b"))
    assert outputs_of_request("lab", "batch_1").output_key == "files/lab/batch_1.jsonl"


@pytest.mark.parametrize("name", ["a", "Z9", "ana@lab.example", "a.b_c-d", "x" * 64])
def test_a_tenants_files_are_under_its_name(name: str) -> None:
    """No other tenant's prefix begins with it."""
    assert check_tenant(name) == name
    assert file_key(name, "file-1") == f"files/{name}/file-1"
    assert outputs_of_request(name, "batch_1").error_key == f"files/{name}/batch_1.errors.jsonl"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "-a", "_a", "@a", "a/b", "a b", "a\n", "ä", "a%2fb", "a#b", "x" * 65]
)
def test_invalid_tenant_names_are_refused(name: str) -> None:
    """A name cannot leave its prefix, hide in a list or look like another's."""
    for make in (check_tenant, lambda each: file_key(each, "file-1")):
        with pytest.raises(InvalidOption) as caught:
            make(name)
        assert caught.value.param == "tenant"
