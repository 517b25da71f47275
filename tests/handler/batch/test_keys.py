"""Keys: each result beside its upload, and nothing that a request says becomes a path."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.batch.keys import (
    batch_id_of_drop,
    batch_id_of_request,
    check_tenant,
    file_key,
    outputs_of_drop,
    outputs_of_request,
    part_key,
    part_prefix,
    segment_key,
    work_prefix,
)
from handler.errors import InvalidOption


@given(st.text(min_size=1, max_size=40))
def test_results_stand_beside_each_other_under_output(stem: str) -> None:
    """Any name keeps its path, dots and all: keys are no paths to S3."""
    outputs = outputs_of_drop(f"input/{stem}.jsonl")
    if "\ud800" <= max(stem) <= "\udfff":
        return
    assert outputs is not None
    assert outputs.output_key == f"output/{stem}.jsonl"
    assert outputs.error_key == f"output/{stem}.errors.jsonl"
    assert outputs.report_key == f"output/{stem}.batch.json"


@pytest.mark.parametrize(
    "key",
    ["x.jsonl", "output/x.jsonl", "input/x.json", "input/.jsonl", "input/", "", "inputx.jsonl"],
)
def test_other_keys_are_no_uploads(key: str) -> None:
    """What the rules of the notification let through by mistake makes no batch."""
    assert outputs_of_drop(key) is None


def test_names_end_where_s3_says() -> None:
    """1,024 bytes for the longest of the results' names, counted in UTF-8."""
    room = 1024 - len("output/.errors.jsonl")
    assert outputs_of_drop(f"input/{'x' * room}.jsonl") is not None
    assert outputs_of_drop(f"input/{'x' * (room + 1)}.jsonl") is None
    assert outputs_of_drop(f"input/{'é' * (room // 2 + 1)}.jsonl") is None


def test_an_id_is_of_one_upload_alone() -> None:
    """The same for the same upload; no two ways to put the same letters together meet."""
    words = ["", "a", "b", "ab", "a/b"]
    ids = [batch_id_of_drop(*each) for each in product(words, repeat=3)]
    ids += [batch_id_of_request(*each) for each in product(words, repeat=2)]
    assert len(set(ids)) == len(ids)
    assert batch_id_of_drop("a", "b", "c") == batch_id_of_drop("a", "b", "c")


def test_work_lies_under_its_batch_in_order() -> None:
    """Parts list in the order of fences and numbers, apart from other shards' and segments."""
    keys = [part_key("b", 1, fence, number) for fence in (1, 2, 10) for number in (0, 9, 10)]
    assert keys == sorted(keys)
    assert all(key.startswith(part_prefix("b", 1)) for key in keys)
    assert not part_key("b", 10, 1, 0).startswith(part_prefix("b", 1))
    assert not segment_key("b", 1, 1, "output", 0).startswith(part_prefix("b", 1))
    assert part_prefix("b", 1).startswith(work_prefix("b"))
    assert outputs_of_request("lab", "batch_1").output_key == "files/lab/batch_1.jsonl"


@pytest.mark.parametrize("name", ["a", "Z9", "ana@lab.example", "a.b_c-d", "x" * 64])
def test_a_tenants_files_lie_under_its_name(name: str) -> None:
    """Its own prefix, which no other tenant's begins with."""
    assert check_tenant(name) == name
    assert file_key(name, "file-1") == f"files/{name}/file-1"
    assert outputs_of_request(name, "batch_1").error_key == f"files/{name}/batch_1.errors.jsonl"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "-a", "_a", "@a", "a/b", "a b", "a\n", "ä", "a%2fb", "a#b", "x" * 65]
)
def test_other_names_are_no_tenants(name: str) -> None:
    """None can leave its prefix, hide in a list or be taken for another's."""
    for make in (check_tenant, lambda each: file_key(each, "file-1")):
        with pytest.raises(InvalidOption) as caught:
            make(name)
        assert caught.value.param == "tenant"
