"""Settings of a deployment's processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from tidemill.batch.shard_cutter import MAX_SHARD_BYTES, MAX_SHARD_LINES, ShardLimits
from tidemill.handler.deployment import deployment
from tidemill.handler.settings import read_settings

NAMES = {
    "TIDEMILL_TABLE": "t",
    "TIDEMILL_BUCKET": "b",
    "TIDEMILL_CONTROL_QUEUE": "https://sqs/control",
}


@pytest.fixture
def _fresh() -> Iterator[None]:
    """Forget the deployment of this process before and after."""
    deployment.cache_clear()
    yield
    deployment.cache_clear()


def test_names_alone_are_enough() -> None:
    """Everything else has a default, and other variables of the environment are ignored."""
    settings = read_settings(NAMES | {"TABLE": "x", "TIDEMILL_OF_A_LATER_VERSION": "x"})
    assert (settings.table, settings.bucket) == ("t", "b")
    assert settings.shard_limits == ShardLimits(MAX_SHARD_LINES, MAX_SHARD_BYTES)
    assert settings.work_queues == settings.gpu_hour_prices == {}
    assert settings.fleets == ""
    assert settings.event_bus == "default"
    assert settings.strict_endpoint is False
    assert (settings.default_window, settings.keep_days) == ("24h", 90)


def test_every_setting_can_be_set() -> None:
    """Maps are JSON, numbers and switches are words."""
    settings = read_settings(
        NAMES
        | {
            "TIDEMILL_WORK_QUEUES": '{"org/model": "https://sqs/work"}',
            "TIDEMILL_GPU_HOUR_PRICES": '{"org/model": 2.5}',
            "TIDEMILL_FLEETS": "/mill/fleets",
            "TIDEMILL_EVENT_BUS": "bus",
            "TIDEMILL_SHARD_LINES": "10",
            "TIDEMILL_SHARD_BYTES": "1000",
            "TIDEMILL_STRICT_ENDPOINT": "1",
            "TIDEMILL_MAX_ATTEMPTS": "2",
            "TIDEMILL_DEFAULT_WINDOW": "14d",
            "TIDEMILL_KEEP_DAYS": "2",
        }
    )
    assert settings.shard_limits == ShardLimits(10, 1000)
    assert settings.work_queues == {"org/model": "https://sqs/work"}
    assert settings.gpu_hour_prices == {"org/model": 2.5}
    assert settings.fleets == "/mill/fleets"
    assert settings.strict_endpoint is True
    assert (settings.event_bus, settings.max_attempts) == ("bus", 2)
    assert (settings.default_window, settings.keep_days) == ("14d", 2)
    assert settings.forget_at(1_000) == 1_000 + 2 * 86_400


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_name_is_reported(name: str) -> None:
    """The error names the field, before anything is done."""
    with pytest.raises(ValidationError, match=name.removeprefix("TIDEMILL_").lower()):
        read_settings({other: value for other, value in NAMES.items() if other != name})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SHARD_LINES", "0"),
        ("SHARD_BYTES", "-1"),
        ("MAX_ATTEMPTS", "many"),
        ("WORK_QUEUES", "not json"),
        ("WORK_QUEUES", '{"model": 7}'),
        ("GPU_HOUR_PRICES", '{"model": 0}'),
        ("STRICT_ENDPOINT", "perhaps"),
        ("DEFAULT_WINDOW", "15d"),
        ("DEFAULT_WINDOW", ""),
        ("KEEP_DAYS", "1"),
    ],
)
def test_a_value_that_cannot_be_is_refused(name: str, value: str) -> None:
    """The error names the setting, and no default is used instead."""
    with pytest.raises(ValidationError, match=name.lower()):
        read_settings(NAMES | {f"TIDEMILL_{name}": value})


def test_an_invalid_window_is_reported_in_a_sentence() -> None:
    """A client that requests it gets the same sentence."""
    with pytest.raises(ValidationError, match="`default_window` must be a number of minutes"):
        read_settings(NAMES | {"TIDEMILL_DEFAULT_WINDOW": "soon"})


@pytest.mark.usefixtures("_fresh")
def test_a_process_belongs_to_one_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read once, and makes the operations on the resources that are named."""
    queues = '{"m": "https://sqs/m"}'
    more = {"TIDEMILL_WORK_QUEUES": queues, "TIDEMILL_FLEETS": "/mill/fleets"}
    for name, value in (NAMES | more).items():
        monkeypatch.setenv(name, value)
    found = deployment()
    assert found is deployment()
    assert (found.table.name, found.bucket.name, found.events.name) == ("t", "b", "default")
    assert found.control.url == "https://sqs/control"
    assert {model: queue.url for model, queue in found.work.items()} == {"m": "https://sqs/m"}
    assert found.fleet_plans.path == "/mill/fleets"
