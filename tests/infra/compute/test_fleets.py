"""Alarms about unfinished work of a model, and their metrics."""

from __future__ import annotations

from typing import Any

import pytest

from tests.infra.compute.kinds import Compute
from tests.infra.conftest import Synth
from tests.long_parameters import with_long
from tidemill.handler.observability import NAMESPACE, Metric

KINDS = {"Braked", "NoWorker", "OldestMessage", "LeasesLost"}


def alarms(made: Compute, slug: str) -> dict[str, dict[str, Any]]:
    """Return the alarms of a model by their kind."""
    prefix = f"Worker{slug}Alarms"
    return {
        name.removeprefix(prefix): found
        for name, found in made.of("AWS::CloudWatch::Alarm").items()
        if name.startswith(prefix)
    }


def test_every_alarm_is_sent(any_kind: Compute) -> None:
    """No alarm goes unseen, and each notification says where to read on."""
    for plan in any_kind.plans().values():
        slug = "".join(filter(str.isalnum, plan.model.lower()))
        found = alarms(any_kind, slug)
        assert set(found) == KINDS
        for alarm in found.values():
            assert alarm["AlarmActions"] == ["EventsAlarms"]
            assert plan.model in alarm["AlarmDescription"]
            assert alarm["AlarmDescription"].endswith("See docs/guides/operate.md.")
            assert alarm["TreatMissingData"] == "notBreaching"
    assert len(any_kind.of("AWS::CloudWatch::Alarm")) == len(KINDS) * len(any_kind.plans())


@pytest.mark.parametrize(
    ("kind", "metric", "service"),
    [
        ("Braked", Metric.FLEET_BRAKED, "reaper"),
        ("LeasesLost", Metric.LEASES_LOST, "worker"),
    ],
)
def test_metrics_of_processes_have_alarms(
    compute: dict[str, Compute], kind: str, metric: Metric, service: str
) -> None:
    """The alarm uses the model's metric, with the name under which a process emits it."""
    alarm = alarms(compute["managed"], "small")[kind]
    assert (alarm["Namespace"], alarm["MetricName"], alarm["Statistic"]) == (
        NAMESPACE,
        metric,
        "Sum",
    )
    assert {item["Name"]: item["Value"] for item in alarm["Dimensions"]} == {
        "service": service,
        "model": "small",
    }


def test_an_open_breaker_raises_an_alarm_at_once(compute: dict[str, Compute]) -> None:
    """The first one does; a lease lost to a machine's death raises none."""
    found = alarms(compute["managed"], "small")
    assert (found["Braked"]["EvaluationPeriods"], found["Braked"]["Threshold"]) == (1, 0)
    assert found["LeasesLost"]["EvaluationPeriods"] > 1


def test_open_work_without_workers_raises_an_alarm(compute: dict[str, Compute]) -> None:
    """It comes after half an hour, which is longer than a machine takes to start."""
    alarm = alarms(compute["managed"], "orgbig")["NoWorker"]
    read = {m["Id"]: m["MetricStat"] for m in alarm["Metrics"] if "MetricStat" in m}
    assert {name: stat["Metric"]["MetricName"] for name, stat in read.items()} == {
        "wanted": Metric.WORKERS_WANTED,
        "workers": Metric.WORKERS,
    }
    for stat in read.values():
        assert stat["Metric"]["Dimensions"] == [
            {"Name": "model", "Value": "org/Big"},
            {"Name": "service", "Value": "reaper"},
        ]
        # Not a minute: a look that comes a little late must be no good news.
        assert stat["Period"] == 300
    [expression] = [m["Expression"] for m in alarm["Metrics"] if "Expression" in m]
    assert expression == "IF(wanted > 0 AND workers < 1, 1, 0)"
    assert (alarm["EvaluationPeriods"], alarm["Threshold"]) == (6, 0)


@pytest.mark.parametrize(
    ("windows", "seconds"),
    with_long([({}, 6 * 3600)], [({"default": "1h"}, 900), ({"default": "14d"}, 302_400)]),
)
def test_shards_that_wait_for_long_raise_an_alarm(
    synth: Synth, windows: dict[str, str], seconds: int
) -> None:
    """It comes while most of the window, a day by default, is left."""
    made = Compute(synth({"windows": windows} if windows else {}))
    found = alarms(made, "tidemilldemo")["OldestMessage"]
    assert found["MetricName"] == "ApproximateAgeOfOldestMessage"
    assert found["Dimensions"] == [
        {"Name": "QueueName", "Value": "DoorbellsWorktidemilldemo.QueueName"}
    ]
    assert (found["ComparisonOperator"], found["Threshold"]) == ("GreaterThanThreshold", seconds)
