"""How tests are shared among processes."""

from __future__ import annotations

from pathlib import Path

from tests.groups import GROUPS, group_of, place_of

ROOT = Path(__file__).parents[1]


def test_every_group_is_of_tests_that_are_there() -> None:
    """A file that was moved is named where it is now, and only once."""
    names = [name for group in GROUPS for name in group]
    assert [name for name in names if not (ROOT / name).exists()] == []
    assert len(set(names)) == len(names)


def test_a_file_belongs_to_the_nearest_group() -> None:
    """A folder's group holds what is not named by itself; whatever is not named comes last."""
    bundle, data, other = (
        f"tests/{name}.py::test_x[a::b]" for name in ("infra/test_bundle", "infra/test_data", "x")
    )
    assert group_of(bundle) == "tests/infra/test_bundle.py"
    assert group_of(data) == "tests/infra"
    assert group_of(other) == "tests/x.py"
    assert place_of(bundle) < place_of(data) < place_of(other)
