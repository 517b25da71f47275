"""The part of a run in which the engine could be full."""

from __future__ import annotations

from bench.compare.timeline import Point, full_points, mean_running


def test_a_run_is_judged_while_others_wait() -> None:
    """Neither how it fills nor how it ends is its fault; a dip between is."""
    running = [(10, 90), (100, 50), (40, 20), (100, 5), (60, 0), (5, 0)]
    points = [Point(at, many, 0.0, waits) for at, (many, waits) in enumerate(running)]
    assert [point.running for point in full_points(points)] == [100, 40, 100]
    assert mean_running(full_points(points)) == 80


def test_a_run_without_waiting_requests_is_full_at_its_peak() -> None:
    """All requests were running."""
    points = [Point(at, many, 0.0, 0) for at, many in enumerate((3, 7, 2))]
    assert [point.running for point in full_points(points)] == [7]
