"""Live items of shards, as earlier and later versions of a worker write them."""

from __future__ import annotations

import json

from tidemill.batch.model import Shard
from tidemill.batch.progress_counts import Progress
from tidemill.handler.aws.items import dump, load
from tidemill.handler.aws.stores.live import live_fields, with_live

PROGRESS = Progress(7, 1, 70, 20, 21, reused=2, truncated=3)
PLANNED = Shard("batch_x", 0, 1, 10, 0, 100)
LIVE = Shard("batch_x", 0, 1, 10, 0, 100, owner="w-1", fence=2, lease_until=9.0, progress=PROGRESS)


def read(state: list[object]) -> Shard:
    """Return the shard of a live item with this state."""
    item = {name: value for name, value in dump(PLANNED).items() if value is not None}
    live = {name: value for name, value in live_fields(LIVE).items() if value is not None}
    return with_live(item, live | {"state": json.dumps(state)})


def test_a_state_has_all_counts_of_a_shard() -> None:
    """A state is read as it was written."""
    assert read(json.loads(str(live_fields(LIVE)["state"]))).progress == PROGRESS


def test_a_state_of_an_earlier_version_has_no_truncated_rows() -> None:
    """Its other counts are those that it had."""
    counts = json.loads(str(live_fields(LIVE)["state"]))
    earlier = counts[: counts.index(PROGRESS.truncated)]
    assert read(earlier).progress == Progress(7, 1, 70, 20, 21, reused=2)


def test_a_state_of_a_later_version_may_have_more() -> None:
    """A count that this version does not know is left out."""
    assert read([*json.loads(str(live_fields(LIVE)["state"])), 5]).progress == PROGRESS


def test_an_item_without_truncated_rows_counts_none() -> None:
    """So do the counts of shards that are done, and a tenant's totals."""
    assert load(Progress, {"completed": 3, "num_shards": 2}).truncated == 0
