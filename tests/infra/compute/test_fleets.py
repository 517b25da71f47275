"""Who is told when a model's work is not done, and by which figures."""

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


def test_every_alarm_is_told(any_kind: Compute) -> None:
    """None turns red unseen, and what people are told says where to read on."""
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
def test_what_processes_tell_is_looked_at(
    compute: dict[str, Compute], kind: str, metric: Metric, service: str
) -> None:
    """By the figure of the model, as whoever counts it tells it."""
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


def test_a_brake_is_told_at_once(compute: dict[str, Compute]) -> None:
    """The first one; a lease that is lost to a machine's death is nothing to tell."""
    found = alarms(compute["managed"], "small")
    assert (found["Braked"]["EvaluationPeriods"], found["Braked"]["Threshold"]) == (1, 0)
    assert found["LeasesLost"]["EvaluationPeriods"] > 1


def test_open_work_without_workers_is_told(compute: dict[str, Compute]) -> None:
    """After half an hour, which is longer than a machine takes to start."""
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
    ("window", "seconds"), with_long([("24h", 6 * 3600)], [("1h", 900), ("14d", 302_400)])
)
def test_shards_that_wait_for_long_are_told(synth: Synth, window: str, seconds: int) -> None:
    """While most of the window is left to do something about it."""
    made = Compute(synth({"windows": {"default": window}}))
    found = alarms(made, "tidemilldemo")["OldestMessage"]
    assert found["MetricName"] == "ApproximateAgeOfOldestMessage"
    assert found["Dimensions"] == [
        {"Name": "QueueName", "Value": "DoorbellsWorktidemilldemo.QueueName"}
    ]
    assert (found["ComparisonOperator"], found["Threshold"]) == ("GreaterThanThreshold", seconds)
