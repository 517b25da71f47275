"""How many workers there are, and who is told when there should be more."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from infra.compute.scaling import steps
from tests.infra.compute.kinds import Compute
from tests.infra.conftest import Synth

MANY = 1000
SIZES = (1, 2, 3, 8, 20, MANY)
Figures = Mapping[str, float | None]


@pytest.fixture(scope="module", params=SIZES)
def sized(request: pytest.FixtureRequest, synth: Synth) -> tuple[int, Compute]:
    """Return deployments of one model with few and many workers."""
    model = {"name": "m", "gpu": "l4", "max_workers": request.param}
    return request.param, Compute(synth({"models": [model]}))


# Steps


@pytest.mark.parametrize("most", SIZES)
def test_steps_cover_every_backlog_once(most: int) -> None:
    """From one shard to any number, without a gap, and in no more steps than AWS takes."""
    found = list(steps(most))
    assert found[0][0] == 1
    assert found[-1][1] is None
    assert [above for _, above, _ in found[:-1]] == [lower for lower, _, _ in found[1:]]
    assert len(found) <= 20


@pytest.mark.parametrize("most", SIZES)
def test_no_step_wants_a_worker_that_has_no_shard(most: int) -> None:
    """Nor fewer than half of those that could work."""
    for lower, above, workers in steps(most):
        largest = min(above - 1 if above else most, most)
        assert workers <= min(lower, most)
        assert workers * 2 >= largest


@pytest.mark.parametrize("most", SIZES)
def test_a_shard_that_is_done_costs_few_workers(most: int) -> None:
    """Those that go may be at work: one at a time, of many no more than a third."""
    wanted = [workers for _, _, workers in steps(most)]
    for fewer, more in pairwise(wanted):
        assert more - fewer <= max(1, more / 3)


# What Application Auto Scaling is told


def test_there_are_none_to_as_many_as_the_configuration_says(sized: tuple[int, Compute]) -> None:
    """The bounds are of the service itself."""
    most, made = sized
    target = made.only("AWS::ApplicationAutoScaling::ScalableTarget")
    assert (target["MinCapacity"], target["MaxCapacity"]) == (0, most)
    assert target["ServiceNamespace"] == "ecs"
    assert target["ScalableDimension"] == "ecs:service:DesiredCount"
    assert target["ResourceId"] == "service/Cluster/WorkermService.Name"


def test_a_backlog_gets_its_workers(sized: tuple[int, Compute]) -> None:
    """The policy and its alarm come to what the steps say, for every backlog."""
    most, made = sized
    threshold = alarm(made, "ScalingWork")["Threshold"]
    for shards in {*range(1, 100), most - 1, most, most + 1, 10 * most} - {0}:
        [wanted] = [
            workers
            for lower, above, workers in steps(most)
            if lower <= shards and (above is None or shards < above)
        ]
        assert adjusted(policy(made, "Grow"), shards - threshold) == wanted


def test_workers_start_with_the_first_shard(sized: tuple[int, Compute]) -> None:
    """One minute of one shard, waiting or running, is enough; none is not."""
    work = alarm(sized[1], "ScalingWork")
    assert (work["EvaluationPeriods"], work["DatapointsToAlarm"]) == (1, 1)
    assert work["AlarmActions"] == ["WorkermScalingGrow"]
    assert breaches(work, {"waiting": 1, "running": 0})
    assert breaches(work, {"waiting": 0, "running": 1})
    assert not breaches(work, {"waiting": 0, "running": 0})


def test_workers_stop_after_a_quarter_of_an_hour_without_a_shard(
    sized: tuple[int, Compute],
) -> None:
    """Every minute of it must have been idle, and they all stop."""
    _, made = sized
    idle = alarm(made, "ScalingIdle")
    assert idle["EvaluationPeriods"] >= 15
    assert idle["DatapointsToAlarm"] == idle["EvaluationPeriods"]
    assert idle["AlarmActions"] == ["WorkermScalingShrink"]
    assert adjusted(policy(made, "Shrink"), 0 - idle["Threshold"]) == 0


@pytest.mark.parametrize(
    ("figures", "is_idle"),
    [
        ({"tasks": 2, "waiting": 0, "running": 0}, True),
        # Loading the last shard's successor, or the shard itself, is work.
        ({"tasks": 2, "waiting": 1, "running": 0}, False),
        ({"tasks": 2, "waiting": 0, "running": 1}, False),
        # A cold start: a task that is to run does not yet, and where none does nothing is counted.
        # There is nobody to stop; the alarm would last and stop who is started next.
        ({"tasks": 0, "waiting": 0, "running": 0}, False),
        ({"tasks": None, "waiting": 0, "running": 0}, False),
        ({"tasks": None, "waiting": 1, "running": 0}, False),
        # The queue has no metrics: a worker that intake has started may have shards.
        ({"tasks": 1, "waiting": None, "running": None}, False),
        ({"tasks": None, "waiting": None, "running": None}, False),
    ],
)
def test_idle_is_who_runs_and_has_no_shard(
    compute: dict[str, Compute], figures: Figures, *, is_idle: bool
) -> None:
    """Missing figures never count as idleness of the queue."""
    idle = alarm(compute["as it is"], "ScalingIdle")
    assert breaches(idle, figures) is is_idle


def test_without_figures_nothing_scales(any_kind: Compute) -> None:
    """A queue that was idle for six hours has none."""
    for name, found in any_kind.of("AWS::CloudWatch::Alarm").items():
        if "Scaling" in name:
            assert found["TreatMissingData"] == "notBreaching"
            assert not breaches(found, {"tasks": 1, "waiting": None, "running": None})


def test_workers_that_load_are_not_stopped_by_a_smaller_backlog(
    sized: tuple[int, Compute],
) -> None:
    """For as long as idle ones are kept, the number does not fall after it rose."""
    for name in ("Grow", "Shrink"):
        found = policy(sized[1], name)
        assert found["AdjustmentType"] == "ExactCapacity"
        assert found["MetricAggregationType"] == "Maximum"
        assert found["Cooldown"] >= 15 * 60


def test_figures_are_of_the_models_own_queue_and_service(compute: dict[str, Compute]) -> None:
    """Each model has its own alarms, of one-minute figures."""
    made = compute["managed"]
    for slug in ("orgbig", "small"):
        for name in ("ScalingWork", "ScalingIdle", "NoWorker"):
            figures = stats_of(alarm(made, name, slug))
            assert {stat["Period"] for stat in figures.values()} == {60}
            for figure, metric in (
                ("waiting", "ApproximateNumberOfMessagesVisible"),
                ("running", "ApproximateNumberOfMessagesNotVisible"),
            ):
                assert figures[figure]["Metric"] == {
                    "Namespace": "AWS/SQS",
                    "MetricName": metric,
                    "Dimensions": [
                        {"Name": "QueueName", "Value": f"DoorbellsWork{slug}.QueueName"}
                    ],
                }
        for name in ("ScalingIdle", "NoWorker"):
            assert stats_of(alarm(made, name, slug))["tasks"]["Metric"] == {
                "Namespace": "ECS/ContainerInsights",
                "MetricName": "RunningTaskCount",
                "Dimensions": [
                    {"Name": "ClusterName", "Value": "tidemill"},
                    {"Name": "ServiceName", "Value": f"Worker{slug}Service.Name"},
                ],
            }


def test_no_alarm_waits_for_figures_that_come_late(any_kind: Compute) -> None:
    """The last minute's always do: FILL would stand in for them, and each minute have its way."""
    expressions = [
        metric["Expression"]
        for found in any_kind.of("AWS::CloudWatch::Alarm").values()
        for metric in found.get("Metrics", ())
        if "Expression" in metric
    ]
    assert expressions
    assert not [expression for expression in expressions if "FILL" in expression]


def test_tasks_are_counted(any_kind: Compute) -> None:
    """Who counts them for the figures above is switched on."""
    assert any_kind.only("AWS::ECS::Cluster")["ClusterSettings"] == [
        {"Name": "containerInsights", "Value": "enabled"}
    ]


# Who is told


@pytest.mark.parametrize(
    ("figures", "is_bad"),
    [
        ({"tasks": 0, "waiting": 3, "running": 0}, True),
        ({"tasks": None, "waiting": 3, "running": 0}, True),
        ({"tasks": 0, "waiting": 0, "running": 1}, True),
        ({"tasks": 1, "waiting": 3, "running": 0}, False),
        ({"tasks": 0, "waiting": 0, "running": 0}, False),
        ({"tasks": 0, "waiting": None, "running": None}, False),
    ],
)
def test_shards_that_no_worker_runs_are_told(
    compute: dict[str, Compute], figures: Figures, *, is_bad: bool
) -> None:
    """After twenty minutes, which is longer than a machine takes to start."""
    found = alarm(compute["as it is"], "NoWorker")
    assert breaches(found, figures) is is_bad
    assert found["EvaluationPeriods"] == 20
    assert found.get("DatapointsToAlarm", 20) == 20


@pytest.mark.parametrize(("window", "seconds"), [("24h", 6 * 3600), ("1h", 900), ("14d", 302_400)])
def test_shards_that_wait_for_long_are_told(synth: Synth, window: str, seconds: int) -> None:
    """While most of the window is left to do something about it."""
    found = alarm(Compute(synth({"windows": {"default": window}})), "OldestMessage")
    assert found["MetricName"] == "ApproximateAgeOfOldestMessage"
    assert found["Dimensions"] == [
        {"Name": "QueueName", "Value": "DoorbellsWorktidemilldemo.QueueName"}
    ]
    assert (found["ComparisonOperator"], found["Threshold"]) == ("GreaterThanThreshold", seconds)


def test_leases_that_are_lost_again_and_again_are_told(any_kind: Compute) -> None:
    """One that is lost to a machine's death is nothing to tell."""
    alarms = any_kind.of("AWS::CloudWatch::Alarm")
    for name in [name for name in alarms if name.endswith("LeasesLost")]:
        found = alarms[name]
        assert (found["Namespace"], found["MetricName"]) == ("Tidemill", "LeasesLost")
        assert {item["Name"] for item in found["Dimensions"]} == {"service", "model"}
        assert {"Name": "service", "Value": "worker"} in found["Dimensions"]
        assert found["Statistic"] == "Sum"
        assert found["EvaluationPeriods"] > 1


def test_every_alarm_is_told_or_scales(any_kind: Compute) -> None:
    """None turns red unseen, and what people are told says where to read on."""
    kinds = {"NoWorker", "OldestMessage", "LeasesLost"}
    told = 0
    for name, found in any_kind.of("AWS::CloudWatch::Alarm").items():
        if "Scaling" not in name:
            assert any(name.endswith(kind) for kind in kinds)
            assert found["AlarmActions"] == ["EventsAlarms"]
            assert found["AlarmDescription"].endswith("See docs/operate.md.")
            told += 1
    assert told == len(kinds) * len(any_kind.of("AWS::ECS::Service"))


def alarm(made: Compute, name: str, slug: str = "") -> dict[str, Any]:
    """Return the alarm of this name of a model, or of the only one."""
    [found] = [
        properties
        for logical_id, properties in made.of("AWS::CloudWatch::Alarm").items()
        if re.fullmatch(rf"Worker{slug or '.+'}{name}", logical_id)
    ]
    return found


def policy(made: Compute, name: str) -> dict[str, Any]:
    """Return what a scaling policy of the only model does."""
    found: dict[str, Any] = made.of("AWS::ApplicationAutoScaling::ScalingPolicy")[
        f"WorkermScaling{name}"
    ]["StepScalingPolicyConfiguration"]
    return found


def adjusted(configuration: Mapping[str, Any], beyond: float) -> int | None:
    """Return the capacity that a policy sets for a figure so far beyond its alarm's threshold.

    Above a threshold the lower bound of a step belongs to it, below it the upper one.
    """
    for step in configuration["StepAdjustments"]:
        lower = step.get("MetricIntervalLowerBound", float("-inf"))
        upper = step.get("MetricIntervalUpperBound", float("inf"))
        if lower <= beyond < upper or (lower < beyond <= upper <= 0):
            return int(step["ScalingAdjustment"])
    return None


def stats_of(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what an alarm's expression reads, by its names."""
    return {
        metric["Id"]: metric["MetricStat"] for metric in found["Metrics"] if "MetricStat" in metric
    }


def breaches(found: Mapping[str, Any], figures: Figures) -> bool:
    """Say whether one minute's figures, None where missing, are beyond an alarm's threshold."""
    expressions = {
        metric["Id"]: metric["Expression"] for metric in found["Metrics"] if "Expression" in metric
    }
    [result] = [metric["Id"] for metric in found["Metrics"] if metric["ReturnData"]]
    names = {name: Figure(figures[name]) for name in stats_of(found)}
    # What others are made of comes before them, the result last.
    for name in sorted(expressions, key=lambda name: name == result):
        names[name] = evaluate(expressions[name], names)
    value = names[result].value
    if value is None:
        return False  # as long as missing data are told to be no breach
    return {
        "GreaterThanThreshold": value > found["Threshold"],
        "GreaterThanOrEqualToThreshold": value >= found["Threshold"],
        "LessThanOrEqualToThreshold": value <= found["Threshold"],
    }[found["ComparisonOperator"]]


@dataclass(frozen=True)
class Figure:
    """One minute of a time series, None where missing, as the rules of metric math have it."""

    value: float | None

    def __add__(self, other: Figure) -> Figure:
        """Return a sum: one that is missing beside another is 0."""
        if self.value is None and other.value is None:
            return self
        return Figure((self.value or 0) + (other.value or 0))

    def __rsub__(self, number: float) -> Figure:
        """Return what is left of a number."""
        return Figure(None if self.value is None else number - self.value)

    def __gt__(self, number: float) -> Figure:
        """Return 1 if it is more than a number, 0 if not."""
        return Figure(None if self.value is None else float(self.value > number))


def either(condition: Figure, then: Figure | float, otherwise: Figure | float) -> Figure:
    """Return what IF does: of two figures one, or 0 in place of a missing first."""
    if condition.value is None:
        return condition
    chosen = then if condition.value else otherwise
    if isinstance(chosen, Figure):
        return Figure(chosen.value or 0) if condition.value else chosen
    return Figure(chosen)


def evaluate(expression: str, names: Mapping[str, Figure]) -> Figure:
    """Return the value of a metric math expression for one minute."""
    known = {"__builtins__": {}, "IF": either}
    found: Figure = eval(expression, known, dict(names))  # noqa: S307 - of our own template
    return found
