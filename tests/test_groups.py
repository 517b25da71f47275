"""Distribution of tests over processes."""

from __future__ import annotations

from pathlib import Path

from tests.groups import GROUPS, group_of, place_of

ROOT = Path(__file__).parents[1]


def test_every_group_lists_existing_tests() -> None:
    """A moved file must be moved there too, and listed only once."""
    names = [name for group in GROUPS for name in group]
    assert [name for name in names if not (ROOT / name).exists()] == []
    assert len(set(names)) == len(names)


def test_a_file_belongs_to_the_nearest_group() -> None:
    """A folder's group has its files that are not listed themselves; others come last."""
    bundle, data, other = (
        f"tests/{name}.py::test_x[a::b]" for name in ("infra/test_bundle", "infra/test_data", "x")
    )
    assert group_of(bundle) == "tests/infra/test_bundle.py"
    assert group_of(data) == "tests/infra"
    assert group_of(other) == "tests/x.py"
    assert place_of(bundle) < place_of(data) < place_of(other)
