"""The dashboard: a deployment on one page, for every model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.infra.compute.kinds import SPOT_MANAGED, TWO
from tests.infra.conftest import Synth
from tests.infra.reading import Deployment
from tidemill.handler.observability import NAMESPACE, Metric

MODELS = {"org/Big": "orgbig", "small": "small"}
FULL_WIDTH = 24
# The reaper's figures stand in our namespace, too.
REAPER = "reaper"
# Functions of metric math that the page uses.
FUNCTIONS = {"FILL", "RUNNING_SUM"}


@pytest.fixture(scope="module")
def made(synth: Synth) -> Deployment:
    """Return a deployment of two models whose GPUs have prices; the first has four a worker."""
    return Deployment(synth(SPOT_MANAGED))


def page(found: Deployment) -> dict[str, Any]:
    """Return the properties of the one dashboard."""
    [properties] = found.properties("AWS::CloudWatch::Dashboard").values()
    return properties


@pytest.fixture(scope="module")
def widgets(made: Deployment) -> dict[str, dict[str, Any]]:
    """Return the widgets of the page by their titles."""
    body = json.loads(page(made)["DashboardBody"])
    found = {widget["properties"]["title"]: widget for widget in body["widgets"]}
    assert len(found) == len(body["widgets"])
    return found


def test_it_has_the_deployments_name(made: Deployment) -> None:
    """Two deployments of an account have two pages."""
    assert page(made)["DashboardName"] == "tidemill"


def test_it_shows_what_an_operator_needs(widgets: dict[str, dict[str, Any]]) -> None:
    """Work, workers, speed, failures, waiting, the API, money."""
    assert set(widgets) == {
        "Shards waiting or running",
        "Workers, running and wanted",
        "Oldest message, seconds",
        "Tokens and audio per second",
        "Rows per minute",
        "Lost leases, dead engines, open circuit breakers",
        "API, milliseconds",
        "API, responses and errors",
        "GPUs, price per hour",
        "Cost of the GPUs (estimate)",
        "Failed messages",
    }


@pytest.mark.parametrize(
    ("title", "namespace", "metrics"),
    [
        (
            "Shards waiting or running",
            "AWS/SQS",
            {"ApproximateNumberOfMessagesVisible", "ApproximateNumberOfMessagesNotVisible"},
        ),
        ("Workers, running and wanted", REAPER, {Metric.WORKERS, Metric.WORKERS_WANTED}),
        ("Oldest message, seconds", "AWS/SQS", {"ApproximateAgeOfOldestMessage"}),
        (
            "Tokens and audio per second",
            NAMESPACE,
            {Metric.COMPLETION_TOKENS, Metric.PROMPT_TOKENS, Metric.AUDIO_SECONDS},
        ),
        (
            "Rows per minute",
            NAMESPACE,
            {
                Metric.ROWS_COMPLETED,
                Metric.ROWS_FAILED,
                Metric.ROWS_REUSED,
                Metric.ROWS_TRUNCATED,
            },
        ),
        ("GPUs, price per hour", REAPER, {Metric.WORKERS}),
        ("Cost of the GPUs (estimate)", REAPER, {Metric.WORKERS}),
    ],
)
def test_every_model_is_shown(
    widgets: dict[str, dict[str, Any]], title: str, namespace: str, metrics: set[str]
) -> None:
    """Each has the existing metrics of its queue, service or name."""
    dimensions = {
        "AWS/SQS": lambda name: {"QueueName": f"DoorbellsWork{MODELS[name]}.QueueName"},
        REAPER: lambda name: {"service": "reaper", "model": name},
        NAMESPACE: lambda name: {"service": "worker", "model": name},
    }[namespace]
    shown = [(found[0], found[1], found[2]) for found in figures(widgets[title])]
    namespace = NAMESPACE if namespace == REAPER else namespace
    assert sorted(shown, key=str) == sorted(
        ((namespace, metric, dimensions(model)) for metric in metrics for model in MODELS), key=str
    )


@pytest.mark.parametrize(
    ("title", "metrics"),
    [
        ("API, milliseconds", {("Latency", "p50"), ("Latency", "p99")}),
        ("API, responses and errors", {("Count", "Sum"), ("4xx", "Sum"), ("5xx", "Sum")}),
    ],
)
def test_the_api_is_shown(
    widgets: dict[str, dict[str, Any]], title: str, metrics: set[tuple[str, str]]
) -> None:
    """Its latency as most and as the slowest meet it, and whose fault the errors are."""
    shown = list(figures(widgets[title]))
    assert {(name, options["stat"]) for _, name, _, options in shown} == metrics
    assert {namespace for namespace, *_ in shown} == {"AWS/ApiGateway"}
    assert all(dimensions == {"ApiId": "HttpApi"} for _, _, dimensions, _ in shown)


def test_troubles_are_shown(widgets: dict[str, dict[str, Any]]) -> None:
    """They include failures of workers, and of their starts."""
    shown = figures(widgets["Lost leases, dead engines, open circuit breakers"])
    assert {(name, tuple(dimensions.values())) for _, name, dimensions, _ in shown} == {
        (metric, (model, service))
        for model in MODELS
        for metric, service in (
            (Metric.LEASES_LOST, "worker"),
            (Metric.ENGINE_DEATHS, "worker"),
            (Metric.FLEET_BRAKED, "reaper"),
        )
    }


def test_messages_that_failed_are_shown(widgets: dict[str, dict[str, Any]]) -> None:
    """All functions that take messages off a queue are included."""
    assert [found[:3] for found in figures(widgets["Failed messages"])] == [
        (NAMESPACE, Metric.MESSAGES_FAILED, {"service": service})
        for service in ("control", "intake", "dead_letters")
    ]


def test_counts_are_summed_over_workers(widgets: dict[str, dict[str, Any]]) -> None:
    """An average of them would be that of a single line of the logs."""
    for widget in widgets.values():
        for namespace, _, dimensions, options in figures(widget):
            if namespace == NAMESPACE and dimensions["service"] != REAPER:
                assert options["stat"] == "Sum"


def test_every_figure_is_of_one_minute(widgets: dict[str, dict[str, Any]]) -> None:
    """Rates and costs are made of sums over a minute, whatever time the page shows."""
    for widget in widgets.values():
        assert {options["period"] for *_, options in figures(widget)} == {60}
        assert {options["period"] for options in expressions(widget)} <= {60}


def test_expressions_name_what_they_read(widgets: dict[str, dict[str, Any]]) -> None:
    """Each name is a legal one, is there once, and nothing is searched for."""
    for title, widget in widgets.items():
        ids = [options["id"] for *_, options in figures(widget) if "id" in options]
        assert len(ids) == len(set(ids)), title
        assert all(re.fullmatch(r"[a-z][a-zA-Z0-9_]*", name) for name in ids)
        for options in expressions(widget):
            read = set(re.findall(r"[A-Za-z_]\w*", options["expression"]))
            assert read <= {*ids, *FUNCTIONS}, title
        read_by_any = " ".join(options["expression"] for options in expressions(widget))
        hidden = [o["id"] for *_, o in figures(widget) if o.get("visible") is False]
        assert all(re.search(rf"\b{name}\b", read_by_any) for name in hidden), title


def test_tokens_are_by_the_second(widgets: dict[str, dict[str, Any]]) -> None:
    """The metric counts those of a minute."""
    widget = widgets["Tokens and audio per second"]
    by_label = {
        options["label"]: evaluate(options["expression"], widget, 120)
        for options in expressions(widget)
    }
    assert by_label == {
        f"{model}, {what}": 2 for model in MODELS for what in ("in", "out", "audio")
    }


def test_running_workers_are_priced(widgets: dict[str, dict[str, Any]]) -> None:
    """Each by its GPUs: they cost the same whether they work or not."""
    widget = widgets["GPUs, price per hour"]
    assert {
        options["label"]: evaluate(options["expression"], widget, 3)
        for options in expressions(widget)
    } == {"org/Big": 3 * 4 * 0.5, "small": 3 * 1 * 2.0}


def test_the_cost_is_summed_over_the_time_shown(widgets: dict[str, dict[str, Any]]) -> None:
    """A minute costs a sixtieth of an hour."""
    [options] = expressions(widgets["Cost of the GPUs (estimate)"])
    assert options["expression"].startswith("RUNNING_SUM(")
    minute = evaluate(options["expression"], widgets["Cost of the GPUs (estimate)"], 3)
    assert minute == pytest.approx((3 * 4 * 0.5 + 3 * 2.0) / 60)


def test_models_without_a_price_cost_nothing(synth: Synth) -> None:
    """The page works without prices too."""
    found = Deployment(synth(TWO))
    body = json.loads(page(found)["DashboardBody"])
    for widget in body["widgets"]:
        if "price" in widget["properties"]["title"]:
            assert [
                evaluate(options["expression"], widget, 3) for options in expressions(widget)
            ] == [0, 0]


def test_widgets_do_not_overlap(widgets: dict[str, dict[str, Any]]) -> None:
    """No widget overlaps another or exceeds the edge."""
    taken: set[tuple[int, int]] = set()
    for widget in widgets.values():
        cells = {
            (widget["x"] + column, widget["y"] + row)
            for column in range(widget["width"])
            for row in range(widget["height"])
        }
        assert not cells & taken
        assert widget["x"] + widget["width"] <= FULL_WIDTH
        taken |= cells


def figures(widget: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, str], dict[str, Any]]]:
    """Yield namespace, name, dimensions and options of each metric that a widget reads."""
    for entry in widget["properties"]["metrics"]:
        if isinstance(entry[0], str):
            namespace, name, *pairs = entry
            options = pairs.pop() if isinstance(pairs[-1], dict) else {}
            yield namespace, name, dict(zip(pairs[::2], pairs[1::2], strict=True)), options


def expressions(widget: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the options of each expression of a widget."""
    return [entry[0] for entry in widget["properties"]["metrics"] if not isinstance(entry[0], str)]


def evaluate(expression: str, widget: dict[str, Any], figure: float) -> float:
    """Return the value of a metric math expression for a minute in which all figures are equal."""
    names = {options["id"]: figure for *_, options in figures(widget) if "id" in options}
    functions = {"FILL": lambda value, _: value, "RUNNING_SUM": lambda value: value}
    value: float = eval(expression, {"__builtins__": {}}, {**functions, **names})  # noqa: S307 - an expression of our own template
    return value
