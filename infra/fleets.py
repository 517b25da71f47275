"""Fleet plans: an SSM parameter for each model's workers, which Lambdas read at each run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from aws_cdk import Duration, Stack
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_iam as iam
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from infra.config import Config, ConfigRefused, Model
from infra.data.stack import DataStack
from infra.monitoring import add_alarm
from tidemill.batch.batch_request import window_seconds
from tidemill.batch.fleet import FleetPlan, LauncherKind
from tidemill.handler.observability import NAMESPACE, Metric

# From a machine's start to the first row: image, weights, parity check. An estimate.
_START_SECONDS = 300
_MINUTE = Duration.minutes(1)
_MAX_PARAMETER = 4096
# An ARN with a role name of maximum length.
_REFERENCE = 100
# AWS limits a policy to 6,144 characters, and a model's ARNs may need 500 of them.
_MODELS_OF_POLICY = 6
# Longer than a machine, its image and its weights take. Metrics may arrive late, so a minute
# without data does not mean that all is well.
_METRIC_PERIOD = Duration.minutes(5)
_NO_WORKER_PERIODS = 6

T = TypeVar("T")


class Fleet(Construct):
    """The plan of one model's workers, at `Config.fleets_path`; a new release of it is new workers.

    Readers notice a new plan without a deployment of theirs: old workers are then replaced.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        config: Config,
        model: Model,
        launcher: LauncherKind,
        release: str,
        means: Mapping[str, Any],
    ) -> None:
        super().__init__(scope, construct_id)
        plan = FleetPlan(
            model=model.name,
            launcher=launcher,
            release=release,
            max_workers=model.max_workers,
            target_seconds=model.target_minutes * 60,
            min_workers=model.min_workers,
            min_workers_hours=model.min_workers_hours,
            means=dict(means),
        )
        text = Stack.of(self).to_json_string(asdict(plan))
        length = _length(Stack.of(self).resolve(text))
        if length > _MAX_PARAMETER:
            raise ConfigRefused(
                f"{model.name} has more {_words(means)} than fit into its plan's SSM parameter: "
                f"the plan has about {length:,} characters, and AWS allows "
                f"{_MAX_PARAMETER:,}. Use fewer or shorter ones."
            )
        ssm.StringParameter(
            self,
            "Plan",
            parameter_name=f"{config.fleets_path}/{model.slug}",
            string_value=text,
            description=f"How workers of {model.name} are started",
        )


def _words(means: Mapping[str, Any]) -> str:
    """Return the configuration keys that enlarge a plan; tags only if no template has them."""
    return "args, aliases, adapters or tags" if "tags" in means else "args, aliases or adapters"


def _length(value: Any) -> int:
    """Return the maximum length of a resolved text once it is deployed."""
    match value:
        case str():
            return len(value)
        case {"Fn::Join": [str(separator), parts]}:
            return sum(_length(part) + len(separator) for part in parts)
    return _REFERENCE


class LaunchPolicies(Construct):
    """Managed policies with the permissions to start, list and stop workers, in the workers' stack.

    They are attached to `roles` of another stack, which does not depend on how workers run. Inline
    policies of a role have a small total size, so these are managed. `policies` contains the
    statements of each.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        roles: Iterable[iam.IRole],
        policies: Iterable[Iterable[iam.PolicyStatement]],
    ) -> None:
        super().__init__(scope, construct_id)
        attached = list(roles)
        for number, statements in enumerate(policies):
            name = f"Policy{number or ''}"
            iam.ManagedPolicy(self, name, roles=attached, statements=list(statements))


def policy_chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield the items of models in chunks that fit into one policy."""
    for first in range(0, len(items), _MODELS_OF_POLICY):
        yield items[first : first + _MODELS_OF_POLICY]


class FleetAlarms(Construct):
    """Alarms for a model whose work is not done: no workers, a circuit breaker, or too few."""

    def __init__(
        self, scope: Construct, construct_id: str, *, data: DataStack, model: Model
    ) -> None:
        super().__init__(scope, construct_id)
        self._data, self._model = data, model
        name = model.name
        self._add(
            "Braked",
            model_metric(model, Metric.FLEET_BRAKED, "reaper"),
            above=0,
            periods=1,
            words=f"Workers of {name} crash, or AWS refuses to start them: no more are started.",
        )
        self._add(
            "NoWorker",
            cloudwatch.MathExpression(
                expression="IF(wanted > 0 AND workers < 1, 1, 0)",
                label="no worker for open work",
                period=_METRIC_PERIOD,
                using_metrics={
                    name: model_metric(model, metric, "reaper", "Maximum", period=_METRIC_PERIOD)
                    for name, metric in (
                        ("wanted", Metric.WORKERS_WANTED),
                        ("workers", Metric.WORKERS),
                    )
                },
            ),
            above=0,
            periods=_NO_WORKER_PERIODS,
            words=f"{name} has open work, or min_workers, but no worker is running.",
        )
        self._add(
            "OldestMessage",
            data.queues.work[name].metric_approximate_age_of_oldest_message(
                period=_MINUTE, statistic="Maximum"
            ),
            above=window_seconds(data.config.windows.default, param="default") / 4,
            periods=15,
            words=f"A shard of {name} has waited for a quarter of its window.",
        )
        self._add(
            "LeasesLost",
            model_metric(model, Metric.LEASES_LOST, period=Duration.minutes(5)),
            above=5,
            periods=3,
            words=f"Workers of {name} lose their leases repeatedly.",
        )

    def _add(
        self, name: str, metric: cloudwatch.IMetric, *, above: float, periods: int, words: str
    ) -> None:
        add_alarm(
            self,
            name,
            topic=self._data.topic,
            metric=metric,
            above=above,
            periods=periods,
            description=words,
        )


def model_metric(
    model: Model,
    metric: Metric,
    service: str = "worker",
    statistic: str = "Sum",
    *,
    label: str | None = None,
    period: Duration = _MINUTE,
) -> cloudwatch.Metric:
    """Return a metric of a model that processes of one service emit."""
    return cloudwatch.Metric(
        namespace=NAMESPACE,
        metric_name=metric.value,
        dimensions_map={"service": service, "model": model.name},
        period=period,
        statistic=statistic,
        label=label,
    )
