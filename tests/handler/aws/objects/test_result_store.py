"""Packs of results in a bucket whose bytes are not those that were written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.long_parameters import with_long
from tidemill.batch.result_key import VERSION, Kept, Scope
from tidemill.batch.result_pack import decode_index, index_size, parse_pack_name
from tidemill.handler.aws.bucket import Bucket
from tidemill.handler.aws.calls import Call, Operation
from tidemill.handler.aws.objects.result_store import ResultStore, list_packs
from tidemill.handler.errors import NotThere

SCOPE = Scope(b"one", "model")
LINE = "a" * 24
NUM_RESULTS = 6


def key_of(number: int) -> bytes:
    """Return the key of a request."""
    return b"%016d" % number


def reply_of(number: int) -> bytes:
    """Return the reply to a request."""
    return b'{"created":1,"text":"%d"}' % number


class Memory:
    """A bucket in memory; objects are as old as their place in it."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def __call__(self, operation: Operation[Any]) -> Any:
        """Run an operation."""
        answer: Any = None
        try:
            call = next(operation)
            while True:
                try:
                    answer = self._answer(call)
                except NotThere as exc:
                    call = operation.throw(exc)
                else:
                    call = operation.send(answer)
        except StopIteration as done:
            return done.value

    def _answer(self, call: Call) -> dict[str, Any]:
        key = call.arguments.get("Key", "")
        match call.method:
            case "put_object":
                self.objects[key] = call.arguments["Body"]
                return {}
            case "list_objects_v2":
                listed = [
                    {
                        "Key": key,
                        "ETag": "e",
                        "Size": len(data),
                        "LastModified": datetime.fromtimestamp(age, UTC),
                    }
                    for age, (key, data) in enumerate(self.objects.items())
                    if key.startswith(call.arguments["Prefix"])
                ]
                return {"Contents": listed}
        if key not in self.objects:
            raise NotThere("no such key")
        data = self.objects[key]
        if "Range" not in call.arguments:
            return {"Body": data}
        assert data, "a range of an empty object is refused"
        start, _, last = call.arguments["Range"].removeprefix("bytes=").partition("-")
        return {"Body": data[int(start) : int(last) + 1], "ContentRange": "some"}


@contextmanager
def opened(memory: Memory) -> Iterator[ResultStore]:
    """Yield a store with the packs of a bucket."""
    store = ResultStore(memory, Bucket("b"), "kept/", SCOPE, 2**30, clock=lambda: 0.0)
    with closing(store):
        yield store


def replies() -> dict[bytes, Kept]:
    """Return the results of a pack."""
    return {key_of(number): Kept(LINE, 1, reply_of(number)) for number in range(NUM_RESULTS)}


@pytest.fixture
def memory() -> Memory:
    """Return a bucket with one pack."""
    memory = Memory()
    with opened(memory) as store:
        store.write("first", replies())
    return memory


def found_in(memory: Memory) -> tuple[int, int]:
    """Return how many results are found and how many are damaged; each is that of its key."""
    with opened(memory) as store:
        found = [store.find(key_of(number), LINE, 1) for number in range(NUM_RESULTS + 1)]
        num_damaged = store.num_damaged
    for number, reply in enumerate(found):
        assert reply in (None, reply_of(number) if number < NUM_RESULTS else None)
    return sum(reply is not None for reply in found), num_damaged


@pytest.mark.parametrize("stride", with_long([3], [1]))
def test_a_flipped_bit_costs_one_result(memory: Memory, stride: int) -> None:
    """A bit of many bytes in turn; the lines of other results find theirs."""
    [name] = memory.objects
    data = memory.objects[name]
    assert found_in(memory) == (NUM_RESULTS, 0)
    for place in range(0, len(data), stride):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        memory.objects[name] = bytes(damaged)
        assert found_in(memory) == (NUM_RESULTS - 1, 1)


def test_a_pack_that_was_cut_off_costs_its_end(memory: Memory) -> None:
    """Wherever it was cut off, even to nothing."""
    [name] = memory.objects
    data = memory.objects[name]
    for size in range(0, len(data), 7):
        memory.objects[name] = data[:size]
        num_found, num_damaged = found_in(memory)
        assert num_found + num_damaged == NUM_RESULTS
        assert num_found < NUM_RESULTS
        if size < index_size(NUM_RESULTS):
            assert num_found == 0


def test_entries_that_lead_to_other_replies_find_nothing(memory: Memory) -> None:
    """The records contain their keys, which exposes even an index with valid checksums."""
    [name] = memory.objects
    data, size = memory.objects[name], index_size(NUM_RESULTS)
    lengths = {entry.size for entry in decode_index(data[:size])}
    [length] = lengths  # of every record
    memory.objects[name] = data[:size] + data[size + length :] + data[size : size + length]
    assert found_in(memory) == (0, NUM_RESULTS)


def test_a_result_that_was_computed_again_replaces_the_damaged_one(memory: Memory) -> None:
    """The pack that was written last is read."""
    [name] = memory.objects
    memory.objects[name] = memory.objects[name][: index_size(NUM_RESULTS)]
    assert found_in(memory) == (0, NUM_RESULTS)
    with opened(memory) as store:
        store.write("second", replies())
    assert found_in(memory) == (NUM_RESULTS, 0)


def test_packs_of_an_earlier_version_are_listed_and_never_read(memory: Memory) -> None:
    """`cache list` and the limit of the size count them."""
    [name] = memory.objects
    data = memory.objects.pop(name)
    older = name.replace(f"/{VERSION}-", "/")
    memory.objects[older] = data
    assert found_in(memory) == (0, 0)
    [pack] = list_packs(memory, Bucket("b"), "kept/")
    assert (pack.head.key, pack.name) == (older, parse_pack_name(name.removeprefix("kept/")))
