"""Shards of a batch, gathered for its end."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

from tidemill.batch.model import BatchError, Shard, ShardStatus
from tidemill.batch.object_keys import segment_key
from tidemill.batch.progress_counts import Progress
from tidemill.batch.result_kinds import ERRORS, OUTPUT
from tidemill.handler.finalize.sealed import Sealed, each_shard

PAGE = 1000


def made(number: int) -> Shard:
    """Return a shard that is done, whose every hundredth was given up."""
    return Shard(
        "batch_1",
        number,
        1 + 9 * number,
        9,
        number,
        number + 1,
        ShardStatus.DONE,
        fence=1 + number % 3,
        progress=Progress(8, 1, gpu_seconds=0.5, rows_per_second=3.0),
        output_sizes=(16, 5 + number % 2),
        error_sizes=(number,) if number % 2 else (),
        abandoned="It was lost." if number % 100 == 99 else None,
    )


class Pages:
    """Stands for aws, deployment and table: gives pages of made up shards."""

    def __init__(self, num_shards: int) -> None:
        self.table = self
        self.num_shards = num_shards
        self.num_pages = 0

    def list_shards_page(self, _: str, first: int) -> tuple[list[Shard], int | None]:
        """Return the next page of them."""
        end = min(first + PAGE, self.num_shards)
        self.num_pages += 1
        return [
            made(number) for number in range(first, end)
        ], end if end < self.num_shards else None

    def run(self, page: Any) -> Any:
        """Return what there is already."""
        return page

    def shards(self) -> Iterator[Shard]:
        """Return all of them, as finalize sees them."""
        mine: Any = self
        return each_shard(mine, mine, "batch_1", lambda: None)


def test_what_is_gathered_is_what_the_shards_have() -> None:
    """Segments in the order of lines under their fences, sums without rates, the first reasons."""
    sealed, shards = Sealed("batch_1"), [made(number) for number in range(250)]
    for shard in shards:
        sealed.add(shard)
    for kind, segments in sealed.segments.items():
        expected = [segment for shard in shards for segment in kind.segments_of(shard)]
        assert list(segments) == segments[:] == expected
        assert segments[-3:] == expected[-3:]
        assert segments.num_bytes == sum(segment.num_bytes for segment in expected)
    assert sealed.segments[OUTPUT][3].key == segment_key("batch_1", 1, 2, "output", 1)
    assert sealed.segments[ERRORS][1].key == segment_key("batch_1", 3, 1, "errors", 0)
    assert sealed.progress == Progress(250 * 8, 250, gpu_seconds=125.0)
    lost = [BatchError("shard_failed", "It was lost.", line=1 + 9 * n) for n in (99, 199)]
    assert sealed.errors == lost


def test_of_many_shards_little_is_held() -> None:
    """A segment takes about twenty bytes; a page of shards and a hundred reasons are held."""
    pages = Pages(11_000)
    tracemalloc.start()
    sealed = Sealed("batch_1")
    for shard in pages.shards():
        sealed.add(shard)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pages.num_pages == 11
    num_segments = sum(map(len, sealed.segments.values()))
    assert num_segments == 27_500
    assert len(sealed.errors) == 100
    assert peak < 40 * num_segments + 2000 * PAGE
