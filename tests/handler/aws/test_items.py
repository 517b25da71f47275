"""Values to items and back: whatever a batch or a shard holds comes back as it was."""

from __future__ import annotations

from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.batch.model import Batch, Shard
from tidemill.batch.progress_counts import Progress
from tidemill.batch.stored_file import File
from tidemill.handler.aws.items import dump, from_item, load, to_item, to_value

PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    NoneType: st.none(),
    bool: st.booleans(),
    int: st.integers(0, 2**63),
    float: st.floats(0, 1e15).filter(lambda number: number == 0 or number > 1e-100),
    # An empty string is one, and nulls, quotes and what is beyond 16 bits are letters.
    str: st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return values of an annotation, with every field set or not."""
    if is_dataclass(hint):
        fields = get_type_hints(hint).items()
        return st.builds(hint, **{name: values(kind) for name, kind in fields})
    if hint in PLAIN:
        return PLAIN[hint]
    args = get_args(hint)
    if get_origin(hint) in {UnionType, Union}:
        return st.one_of(*map(values, args))
    if get_origin(hint) is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if get_origin(hint) is dict:
        return st.dictionaries(*map(values, args), max_size=3)
    return st.sampled_from(args or list(hint))


@pytest.mark.parametrize("kind", [Batch, Shard, File, Progress])
@given(st.data())
def test_a_value_comes_back_as_it_was(kind: type[Any], data: st.DataObject) -> None:
    """Types are preserved: ints are not floats, empty tuples and nulls are retained."""
    value = data.draw(values(kind))
    item = to_item({"pk": "key", "tenant_index": 7} | dump(value))
    found = load(kind, from_item(item))
    assert found == value
    assert repr(found) == repr(value)


@given(values(Shard))
def test_an_item_holds_no_nulls(shard: Shard) -> None:
    """`attribute_not_exists` must be true of what is None: claims ask it of the owner."""
    item = to_item(dump(shard))
    assert ("owner" in item) is (shard.owner is not None)
    assert "NULL" not in {kind for attribute in item.values() for kind in attribute}


def test_nulls_inside_a_value_are_left_out_too() -> None:
    """They come back as the defaults that they were."""
    assert to_item({"a": None, "b": {"c": None, "d": 1}}) == {"b": {"M": {"d": {"N": "1"}}}}


def test_an_item_of_another_version_can_be_read() -> None:
    """A field that is not known is passed over, one that is not there has its default."""
    shard = Shard("batch_1", 0, 1, 10, 0, 100)
    item = to_item(dump(shard) | {"invented_later": {"x": 1}})
    for name in ("suspects", "attempts", "abandoned"):
        item.pop(name, None)
    assert load(Shard, from_item(item)) == shard


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused(number: float) -> None:
    """DynamoDB has no such numbers: the error comes before the call."""
    with pytest.raises(TypeError):
        to_value(number)
