"""How many workers a model has: by its backlog, shards that wait and shards that run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aws_cdk import Duration
from aws_cdk import aws_applicationautoscaling as scaling
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_sqs as sqs
from constructs import Construct

_MINUTE = Duration.minutes(1)
# A worker that goes and comes again costs minutes of loading; so long it waits for more.
IDLE_MINUTES = 15
# Of one policy of Application Auto Scaling.
_MAX_STEPS = 20


def backlog(
    queue: sqs.IQueue, *, label: str = "shards", prefix: str = ""
) -> cloudwatch.MathExpression:
    """Return the shards of a queue that wait or run: what runs is in flight and not visible.

    `prefix` keeps the names in the expression apart where several stand in one graph.
    """
    waiting, running = f"{prefix}waiting", f"{prefix}running"
    return cloudwatch.MathExpression(
        expression=f"{waiting} + {running}",
        label=label,
        period=_MINUTE,
        using_metrics={
            waiting: queue.metric_approximate_number_of_messages_visible(
                period=_MINUTE, statistic="Maximum"
            ),
            running: queue.metric_approximate_number_of_messages_not_visible(
                period=_MINUTE, statistic="Maximum"
            ),
        },
    )


def steps(max_workers: int) -> Iterator[tuple[int, int | None, int]]:
    """Yield (from, below, workers): of a backlog in that range so many workers are wanted.

    A worker for each shard. Where AWS takes no step for each of them, steps grow by equal factors:
    with few and large ones the last shards of a batch would lose half of their workers at once.
    """
    last = _MAX_STEPS - 1
    ends: Sequence[int] = (
        range(1, max_workers + 1)
        if max_workers <= _MAX_STEPS
        else sorted({round(max_workers ** (number / last)) for number in range(_MAX_STEPS)})
    )
    for workers, above in zip(ends, [*ends[1:], None], strict=True):
        yield workers, above, workers


def running_tasks(*, cluster: str, service: str, label: str) -> cloudwatch.Metric:
    """Return how many tasks of a service run; where none does, nothing is counted at all."""
    return cloudwatch.Metric(
        namespace="ECS/ContainerInsights",
        metric_name="RunningTaskCount",
        dimensions_map={"ClusterName": cluster, "ServiceName": service},
        period=_MINUTE,
        statistic="Maximum",
        label=label,
    )


class BacklogScaling(Construct):
    """Sets the number of a service's tasks: up at once, to nothing after a quarter of an hour.

    A queue that was idle for six hours has no metrics, and gets them back late: missing data
    changes nothing, and intake starts the first worker itself.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        service: ecs.BaseService,
        queue: sqs.IQueue,
        tasks: cloudwatch.IMetric,
        max_workers: int,
    ) -> None:
        """`tasks` counts those that run."""
        super().__init__(scope, construct_id)
        count = service.auto_scale_task_count(min_capacity=0, max_capacity=max_workers)
        target = count.node.find_child("Target")
        assert isinstance(target, scaling.ScalableTarget)
        comparison = cloudwatch.ComparisonOperator
        grow = self._action("Grow", target)
        for lower, upper, workers in steps(max_workers):
            # Bounds count from the alarm's threshold, which is 1.
            grow.add_adjustment(
                adjustment=workers,
                lower_bound=lower - 1,
                upper_bound=None if upper is None else upper - 1,
            )
        self._alarm(
            "Work",
            grow,
            metric=backlog(queue),
            threshold=1,
            comparison=comparison.GREATER_THAN_OR_EQUAL_TO_THRESHOLD,
            minutes=1,
            description="Starts workers",
        )
        shrink = self._action("Shrink", target)
        shrink.add_adjustment(adjustment=0, upper_bound=0)
        self._alarm(
            "Idle",
            shrink,
            metric=_work_of(tasks, queue),
            threshold=0,
            comparison=comparison.LESS_THAN_OR_EQUAL_TO_THRESHOLD,
            minutes=IDLE_MINUTES,
            description="Stops the last workers",
        )

    def _action(self, name: str, target: scaling.ScalableTarget) -> scaling.StepScalingAction:
        return scaling.StepScalingAction(
            self,
            name,
            scaling_target=target,
            adjustment_type=scaling.AdjustmentType.EXACT_CAPACITY,
            metric_aggregation_type=scaling.MetricAggregationType.MAXIMUM,
            # Holds back what would lessen the number, never what would raise it further: with a
            # shard done, or miscounted, workers that are still loading are not stopped.
            cooldown=Duration.minutes(IDLE_MINUTES),
        )

    def _alarm(
        self,
        name: str,
        action: scaling.StepScalingAction,
        *,
        metric: cloudwatch.IMetric,
        threshold: int,
        comparison: cloudwatch.ComparisonOperator,
        minutes: int,
        description: str,
    ) -> None:
        alarm = cloudwatch.Alarm(
            self,
            name,
            metric=metric,
            threshold=threshold,
            comparison_operator=comparison,
            evaluation_periods=minutes,
            datapoints_to_alarm=minutes,
            treat_missing_data=cloudwatch.TreatMissingData.NOT_BREACHING,
            alarm_description=description,
        )
        alarm.add_alarm_action(actions.ApplicationScalingAction(action))


def _work_of(tasks: cloudwatch.IMetric, queue: sqs.IQueue) -> cloudwatch.MathExpression:
    """Return 0 for a minute in which tasks run and are known to have no shard.

    An alarm acts each minute for as long as it lasts: what is 0 while there are no workers would
    stop the first that intake starts, before it runs. So a cold start, of which nothing is counted,
    is no idleness, and a queue whose metrics have yet to come back is none. Nothing is filled in:
    the last minute's figures always come late, and would have the filling decide.
    """
    return cloudwatch.MathExpression(
        expression="IF(shards > 0, 1, IF(tasks > 0, 0, 1))",
        label="work for workers",
        period=_MINUTE,
        using_metrics={"tasks": tasks, "shards": backlog(queue)},
    )
