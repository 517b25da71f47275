"""The CloudWatch dashboard: a deployment on one page."""

from __future__ import annotations

from collections.abc import Sequence

from aws_cdk import Duration
from aws_cdk import aws_cloudwatch as cloudwatch
from constructs import Construct

from infra.api.http_api import ApiMetric
from infra.api.stack import ApiStack
from infra.config import Model
from infra.data.stack import DataStack
from infra.fleets import model_metric
from tidemill.handler.observability import Metric

_MINUTE = Duration.minutes(1)
_WIDTH, _HEIGHT = 8, 6
_TROUBLES = (Metric.LEASES_LOST, Metric.ENGINE_DEATHS)


class Dashboard(Construct):
    """Shows work, workers, speed, failures, the API and the cost of GPUs, with a line per model."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        data: DataStack,
        api: ApiStack,
    ) -> None:
        super().__init__(scope, construct_id)
        self._data, self._api = data, api
        models = data.config.models
        self.dashboard = cloudwatch.Dashboard(
            self,
            "Dashboard",
            dashboard_name=data.config.name,
            default_interval=Duration.hours(12),
            widgets=[
                [
                    self._graph("Shards waiting or running", [self._backlog(m) for m in models]),
                    self._graph(
                        "Workers, running and wanted",
                        [_workers(m) for m in models]
                        + [
                            model_metric(
                                m,
                                Metric.WORKERS_WANTED,
                                "reaper",
                                "Maximum",
                                label=f"{m.name}, wanted",
                            )
                            for m in models
                        ],
                    ),
                    self._graph("Oldest message, seconds", [self._age(m) for m in models]),
                ],
                [
                    self._graph(
                        "Tokens and audio per second",
                        [_rate(m, Metric.COMPLETION_TOKENS, "out") for m in models]
                        + [_rate(m, Metric.PROMPT_TOKENS, "in") for m in models]
                        + [_rate(m, Metric.AUDIO_SECONDS, "audio") for m in models],
                    ),
                    self._graph(
                        "Rows per minute",
                        [_sum(m, Metric.ROWS_COMPLETED, "good") for m in models]
                        + [_sum(m, Metric.ROWS_FAILED, "failed") for m in models]
                        + [_sum(m, Metric.ROWS_REUSED, "reused") for m in models]
                        + [_sum(m, Metric.ROWS_TRUNCATED, "truncated") for m in models],
                    ),
                    self._graph(
                        "Lost leases, dead engines, open circuit breakers",
                        [_sum(m, name, name) for m in models for name in _TROUBLES]
                        + [
                            model_metric(
                                m, Metric.FLEET_BRAKED, "reaper", label=f"{m.name}, breaker open"
                            )
                            for m in models
                        ],
                    ),
                ],
                [
                    *self._api_graphs(),
                    self._graph("GPUs, price per hour", [self._price(m) for m in models]),
                ],
                [
                    self._cost(models),
                    self._graph(
                        "Failed messages",
                        [
                            function.metric(Metric.MESSAGES_FAILED, _MINUTE)
                            for function in (api.control, api.intake, api.dead_letters)
                        ],
                    ),
                ],
            ],
        )

    def _graph(self, title: str, metrics: Sequence[cloudwatch.IMetric]) -> cloudwatch.GraphWidget:
        return cloudwatch.GraphWidget(
            title=title,
            left=list(metrics),
            left_y_axis=cloudwatch.YAxisProps(min=0),
            width=_WIDTH,
            height=_HEIGHT,
        )

    def _backlog(self, model: Model) -> cloudwatch.IMetric:
        """Return the waiting and the running shards, whose messages are visible and in flight."""
        queue = self._data.queues.work[model.name]
        waiting, running = f"{_id_of(model)}waiting", f"{_id_of(model)}running"
        return cloudwatch.MathExpression(
            expression=f"{waiting} + {running}",
            label=model.name,
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

    def _age(self, model: Model) -> cloudwatch.IMetric:
        queue = self._data.queues.work[model.name]
        return queue.metric_approximate_age_of_oldest_message(
            period=_MINUTE, statistic="Maximum", label=model.name
        )

    def _api_graphs(self) -> list[cloudwatch.GraphWidget]:
        gateway = self._api.gateway
        if gateway is None:
            return []
        latencies = [
            gateway.metric("latency", period=_MINUTE, statistic=statistic, label=statistic)
            for statistic in ("p50", "p99")
        ]
        names: tuple[ApiMetric, ...] = ("requests", "4xx", "5xx")
        answers = [
            gateway.metric(name, period=_MINUTE, statistic="Sum", label=name) for name in names
        ]
        return [
            self._graph("API, milliseconds", latencies),
            self._graph("API, responses and errors", answers),
        ]

    def _price(self, model: Model) -> cloudwatch.IMetric:
        """Return the hourly cost of the running workers, at the configured price."""
        name = f"{_id_of(model)}workers"
        return cloudwatch.MathExpression(
            expression=f"FILL({name}, 0) * {model.gpus_per_worker * model.gpu_hour_price:g}",
            label=model.name,
            period=_MINUTE,
            using_metrics={name: _workers(model)},
        )

    def _cost(self, models: Sequence[Model]) -> cloudwatch.SingleValueWidget:
        """Return the cost of running GPUs over the shown period, busy or idle."""
        terms = {f"{_id_of(model)}workers": model for model in models}
        hourly = " + ".join(
            f"FILL({name}, 0) * {model.gpus_per_worker * model.gpu_hour_price:g}"
            for name, model in terms.items()
        )
        return cloudwatch.SingleValueWidget(
            title="Cost of the GPUs (estimate)",
            metrics=[
                cloudwatch.MathExpression(
                    expression=f"RUNNING_SUM(({hourly}) / 60)",
                    label="in the shown period",
                    period=_MINUTE,
                    using_metrics={name: _workers(model) for name, model in terms.items()},
                )
            ],
            width=_WIDTH,
            height=_HEIGHT // 2,
        )


def _workers(model: Model) -> cloudwatch.Metric:
    return model_metric(model, Metric.WORKERS, "reaper", "Maximum", label=model.name)


def _sum(model: Model, name: Metric, label: str) -> cloudwatch.Metric:
    return model_metric(model, name, label=f"{model.name}, {label}")


def _rate(model: Model, name: Metric, label: str) -> cloudwatch.MathExpression:
    """Return the per-second rate of a sum over one-minute periods, over all workers of a model."""
    tokens = f"{_id_of(model)}{name.lower()}"
    return cloudwatch.MathExpression(
        expression=f"{tokens} / 60",
        label=f"{model.name}, {label}",
        period=_MINUTE,
        using_metrics={tokens: _sum(model, name, label)},
    )


def _id_of(model: Model) -> str:
    """Return the model's name as a metric math ID: lower-case letters, digits, no dashes."""
    return f"m_{model.slug.replace('-', '_')}_"
