"""Evidence of a chaos run: journals of engines, logs of workers, and faults."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos.faults import Fault

_AFTERMATH_SECONDS = 1.0
# What only the owner of a shard can do.
_DEEDS = frozenset({"part written", "released"})


class Computed(NamedTuple):
    """One request that an engine began or finished."""

    custom_id: str
    event: str
    at: float


def read_journal(path: Path) -> list[Computed]:
    """Return what a scripted engine noted; a line torn by a kill is left out."""
    if not path.exists():
        return []
    found = [line.split("\t") for line in path.read_text().splitlines()]
    return [Computed(line[0], line[1], float(line[2])) for line in found if len(line) == 3]


@dataclass(frozen=True, slots=True)
class Logged:
    """One event of a worker's log."""

    message: str
    at: float
    fields: dict[str, Any]

    def lines(self, field: str) -> set[int]:
        """Return the line numbers that a field names in short form."""
        return parse_ranges(self.fields[field])


def read_log(text: str) -> list[Logged]:
    """Return the JSON events of a log; anything else in it is left out."""
    events = []
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        try:
            fields = json.loads(line)
        except ValueError:
            continue  # torn by a kill
        at = datetime.strptime(fields["timestamp"], "%Y-%m-%d %H:%M:%S,%f%z").timestamp()
        events.append(Logged(fields["message"], at, fields))
    return events


def parse_ranges(text: str) -> set[int]:
    """Return the numbers of `1-3,7`."""
    numbers: set[int] = set()
    for piece in filter(None, text.split(",")):
        low, _, high = piece.partition("-")
        numbers.update(range(int(low), int(high or low) + 1))
    return numbers


def line_of(custom_id: str) -> int:
    """Return the line number that a custom id of these tests holds."""
    return int(custom_id.rpartition("-")[2])


def computed_although_kept(journal: list[Computed], log: list[Logged]) -> list[str]:
    """Return the lines that a worker ran although they were durable when it claimed their shard."""
    found = []
    for claim in log:
        if claim.message != "claimed":
            continue
        kept = claim.lines("kept")
        found += [
            f"line {line_of(each.custom_id)} of a claim at {claim.at}, begun at {each.at}"
            for each in journal
            # The log's clock has milliseconds.
            if each.event == "started"
            and line_of(each.custom_id) in kept
            and each.at > claim.at + 0.001
        ]
    return found


def overlooked(log: Iterable[Logged]) -> list[str]:
    """Return the claims that did not find rows that were durable before; `log` has all workers.

    Before each part, and before it gives a shard back, an owner still has the lease. So its parts,
    except for the last event of its log, existed before the next claim, whatever the clocks show.
    """
    events = [event for event in log if "fence" in event.fields]
    found = []
    for claim in events:
        if claim.message != "claimed":
            continue
        durable: set[int] = set()
        for deeds in _deeds_by_claim(events, before=claim).values():
            durable.update(*(deed.lines("lines") for deed in deeds[:-1] if "lines" in deed.fields))
        if missed := durable - claim.lines("kept"):
            found.append(f"{sorted(missed)} by {claim.fields}")
    return found


def most_parts_of_a_claim(log: Iterable[Logged]) -> int:
    """Return how many parts the most diligent owner of a shard has written."""
    return max(
        Counter(
            (event.fields["shard"], event.fields["fence"])
            for event in log
            if event.message == "part written"
        ).values(),
        default=0,
    )


def _deeds_by_claim(events: Iterable[Logged], before: Logged) -> dict[int, list[Logged]]:
    """Return by fence, in their order, what earlier owners of a shard did while they had it."""
    deeds: dict[int, list[Logged]] = defaultdict(list)
    for event in events:
        is_same = all(event.fields[name] == before.fields[name] for name in ("batch_id", "shard"))
        if event.message in _DEEDS and is_same and event.fields["fence"] < before.fields["fence"]:
            deeds[event.fields["fence"]].append(event)
    return deeds


def lost_without_reason(
    name: str,
    journal: list[Computed],
    log: list[Logged],
    faults: Iterable[Fault],
    seconds: float,
) -> list[str]:
    """Return rows that a worker finished, that are missing, and that no fault explains.

    A fault explains what was finished in the `seconds` before it. Shortly after it, an engine may
    finish rows that no worker can have: on waking, before its requests are taken back, and before
    the system ends it after its killed worker.
    """
    written = [(event.at, event.lines("lines")) for event in log if event.message == "part written"]
    own = [fault for fault in faults if fault.name == name]
    harmed = [(fault.at - seconds, fault.at) for fault in own]
    harmed += [
        (fault.at, fault.at + _AFTERMATH_SECONDS)
        for fault in own
        if fault.kind in {"SIGCONT", "SIGKILL"}
    ]
    return [
        f"line {line_of(each.custom_id)} finished at {each.at}"
        for each in journal
        if each.event == "finished"
        and not any(
            at >= each.at - 0.001 and line_of(each.custom_id) in lines for at, lines in written
        )
        and not any(begin <= each.at <= end for begin, end in harmed)
    ]
