"""The checks of the chaos suite can fail: each finds the harm that it is there for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.chaos.evidence import (
    Computed,
    Logged,
    computed_although_kept,
    lost_without_reason,
    most_parts_of_a_claim,
    overlooked,
    parse_ranges,
    read_journal,
    read_log,
)
from tests.chaos.faults import Fault


def logged(message: str, at: float = 0, fence: int = 1, shard: int = 0, **fields: Any) -> Logged:
    """Return an event of the only batch."""
    return Logged(message, at, {"batch_id": "b", "shard": shard, "fence": fence, **fields})


def lost(journal: list[Computed], *faults: Fault, log: tuple[Logged, ...] = ()) -> list[str]:
    """Return what the worker `w` has lost, when a fault explains ten seconds."""
    return lost_without_reason("w", journal, list(log), faults, 10)


def test_a_part_that_a_takeover_did_not_read_is_found() -> None:
    """Its owner wrote another one after it, so it was there before the next claim."""
    log = [
        logged("part written", lines="1-2"),
        logged("part written", lines="3"),
        logged("claimed", fence=2, kept="2-3"),
    ]
    assert [words.partition(" by ")[0] for words in overlooked(log)] == ["[1]"]


def test_the_last_part_of_a_dead_owner_may_come_too_late() -> None:
    """It may have been on its way when the next one claimed, but not in a shard given back."""
    part, claim = logged("part written", lines="1"), logged("claimed", fence=2, kept="")
    assert overlooked([part, claim]) == []
    assert len(overlooked([part, logged("released"), claim])) == 1


def test_other_shards_and_later_owners_are_not_held_against_a_claim() -> None:
    """Only what an earlier owner of the same shard has written can be kept."""
    log = [
        logged("part written", shard=1, lines="81"),
        logged("released", shard=1),
        logged("claimed", fence=2, kept=""),
        logged("part written", fence=2, lines="1"),
        logged("released", fence=2),
    ]
    assert overlooked(log) == []


def test_the_parts_of_each_claim_are_counted_apart() -> None:
    """Two owners with a part each have not made rows durable while they ran."""
    parts = [logged("part written", fence=1), logged("part written", fence=2)]
    assert most_parts_of_a_claim([]) == 0
    assert most_parts_of_a_claim(parts) == 1
    assert most_parts_of_a_claim([*parts, logged("part written", fence=2)]) == 2


def test_a_kept_line_that_is_begun_again_is_found() -> None:
    """Lines begun before the claim, and lines that were not stored, may begin again."""
    log = [logged("claimed", at=5, kept="1,3")]
    begun = [Computed("line-1", "started", at) for at in (4.0, 6.0)]
    fine = [Computed("line-2", "started", 6), Computed("line-3", "finished", 6)]
    assert len(computed_although_kept([*begun, *fine], log)) == 1


def test_a_finished_row_that_was_never_written_is_found() -> None:
    """One that is in a part, in the one after its end, is not missed."""
    rows = [Computed("line-1", "finished", 20), Computed("line-2", "finished", 20)]
    log = (logged("part written", at=21, lines="2"), logged("part written", at=19, lines="1"))
    assert lost(rows, log=log) == ["line 1 finished at 20"]


def test_a_fault_explains_what_was_finished_shortly_before_it() -> None:
    """The fault must be the worker's, and the row no older than a kill may cost."""
    row = [Computed("line-1", "finished", 20)]
    assert lost(row, Fault(29, "SIGKILL", "w")) == []
    assert lost(row, Fault(31, "SIGKILL", "w"))
    assert lost(row, Fault(29, "SIGKILL", "other"))


def test_an_engine_outlives_its_worker_for_a_moment() -> None:
    """Rows that it finishes then may be lost; a SIGTERM or an old fault is not an excuse."""
    row = [Computed("line-1", "finished", 20)]
    assert lost(row, Fault(19.5, "SIGKILL", "w")) == []
    assert lost(row, Fault(19.5, "SIGCONT", "w")) == []
    assert lost(row, Fault(19.5, "SIGTERM", "w"))
    assert lost(row, Fault(18.5, "SIGKILL", "w"))


def test_lines_that_a_kill_has_torn_are_left_out(tmp_path: Path) -> None:
    """Torn lines of journals and logs alike are ignored."""
    journal = tmp_path / "journal"
    journal.write_text("line-1\tstarted\t1.5\nline-1\tfin")
    event = {"message": "claimed", "timestamp": "2026-01-01 00:00:01,500+0000", "kept": "1"}
    [found] = read_log(f"Traceback\n{json.dumps(event)}\n{json.dumps(event)[:30]}")
    assert read_journal(journal) == [Computed("line-1", "started", 1.5)]
    assert read_journal(tmp_path / "none") == []
    assert (found.message, found.at, found.lines("kept")) == ("claimed", 1767225601.5, {1})


def test_ranges_are_read_as_workers_print_them() -> None:
    """Nothing is an empty set."""
    assert parse_ranges("") == set()
    assert parse_ranges("1-3,7") == {1, 2, 3, 7}
