"""Calls that a page of rows waits for, in a large batch whose bucket and table are simulated."""

from __future__ import annotations

import pytest

from bench.cloud.row_pages import Cloud, batch_of, queries
from tidemill.handler.queries.part_cache import PartCache
from tidemill.handler.queries.row_search import search_rows

NUM_ROWS = 1_000_000
ROUNDS = {
    "failed, first page": 3,
    "truncated, first page": 3,
    "all, in the middle": 4,
    "one line": 4,
    "text, no match": 8,
}


@pytest.fixture(scope="module", name="cloud")
def fixture_cloud() -> Cloud:
    """Return a cloud that answers at once."""
    return Cloud(NUM_ROWS, 0.0)


@pytest.mark.parametrize("name", ROUNDS)
def test_calls_are_concurrent(cloud: Cloud, name: str) -> None:
    """A page waits for few calls; its bytes do not grow with the batch."""
    query = queries(NUM_ROWS)[name]
    cloud.reset()
    batch, cache = batch_of(cloud, NUM_ROWS), PartCache()
    found = search_rows(cloud, cloud.deployment, batch, cache, query, limit=25)
    assert cloud.num_rounds <= ROUNDS[name]
    assert cloud.num_bytes < 20e6
    assert found.rows or query.text
