"""Before its stacks are deleted, a deployment's workers end, and no others are started."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from infra.config import DEFAULT_PATH
from infra.ops import stop
from infra.ops.outputs import NotDeployed
from infra.ops.stop import stop_all
from tests.emulators import Emulator
from tests.handler.finalize.rig import Cloud
from tidemill.batch.fleet import FleetPlan
from tidemill.handler.aws.parameters import plan_text
from tidemill.handler.aws.stores.processes import Process
from tidemill.handler.fleet.circuit_breaker import STOPPED

NOW = 1_700_000_000
MODELS = ("one", "two")


@pytest.fixture
def cloud(ministack: Emulator) -> Cloud:
    """Return a deployment of two models, the first of which has two workers."""
    path = f"/tidemill/{uuid4().hex}/fleets"
    made = Cloud.on(ministack, fleets=path)
    ssm = ministack.client("ssm")
    for model in MODELS:
        plan = FleetPlan(model, "processes", "r:1")
        ssm.put_parameter(Name=f"{path}/{model}", Value=plan_text(plan), Type="String")
    for number in (1, 2):
        ask(made, number)
    return made


def ask(cloud: Cloud, number: int) -> None:
    """Have the first model have a worker."""
    process = Process(f"process-{number}", "r:1", "running", NOW)
    cloud.run(cloud.deployment.processes.ask("one", process))


def states(cloud: Cloud) -> dict[str, str]:
    """Return what the first model's workers are doing."""
    found = cloud.run(cloud.deployment.processes.list_processes("one"))
    return {process.id: process.state for process in found}


def end_stopping(cloud: Cloud) -> None:
    """End the workers that were stopped."""
    for name, state in states(cloud).items():
        if state == "stopping":
            cloud.run(cloud.deployment.processes.forget("one", name))


def run(cloud: Cloud, sleep: Callable[[float], None]) -> list[str]:
    """Stop everything; what happens between two looks is `sleep`'s to say."""
    return stop_all(cloud.aws, cloud.deployment, NOW, sleep)


def test_workers_end_and_no_others_are_started(cloud: Cloud) -> None:
    """A worker that a Lambda was about to start in the meantime ends too."""

    def late(_: float) -> None:
        if len(states(cloud)) == 2:
            ask(cloud, 3)
        end_stopping(cloud)

    assert run(cloud, late) == []
    assert states(cloud) == {}
    for model in MODELS:
        breaker = cloud.run(cloud.deployment.fleets.get_state(model)).breaker
        assert breaker is not None
        assert breaker.code == STOPPED


def test_who_does_not_end_is_named(cloud: Cloud) -> None:
    """It is named after AWS's own timeout, which is polled."""
    looks: list[float] = []
    assert run(cloud, looks.append) == ["one"]
    assert 120 < sum(looks) < 300
    assert set(states(cloud).values()) == {"stopping"}


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Return a function that runs the command with an answer to its question."""

    def answer(text: str) -> int:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return stop.main(["--config", str(DEFAULT_PATH)])

    return answer


@pytest.mark.parametrize("text", ["", "\n", "y\n", "tidemil\n"])
def test_nothing_is_done_without_the_name(
    answered: Callable[[str], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
) -> None:
    """An accidental key press must not delete a deployment."""
    monkeypatch.setattr(stop, "aws_client", lambda _: None)
    monkeypatch.setattr(stop, "read_outputs", lambda *_, **__: None)
    assert answered(text) == 1
    assert "nothing was changed" in capsys.readouterr().err


def test_the_name_ends_the_workers_of_the_deployment(
    answered: Callable[[str], int],
    cloud: Cloud,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They are found in the outputs of its stacks."""

    def deployment(*_: Any) -> Any:
        return cloud.deployment

    monkeypatch.setattr(stop, "aws_client", lambda _: None)
    monkeypatch.setattr(stop, "read_outputs", lambda *_, **__: stand_in())
    monkeypatch.setattr(stop, "Aws", lambda: cloud.aws)
    monkeypatch.setattr(stop, "Deployment", deployment)
    sleep = partial(stop_all, sleep=lambda _: end_stopping(cloud))
    monkeypatch.setattr(stop, "stop_all", sleep)
    assert answered("tidemill\n") == 0
    assert "All workers have ended." in capsys.readouterr().out
    assert states(cloud) == {}


def stand_in() -> Any:
    """Return outputs with an environment that settings can be read from."""
    names = ("TABLE", "BUCKET", "CONTROL_QUEUE")
    environment = {f"TIDEMILL_{name}": "x" for name in names}
    return type("Outputs", (), {"environment": environment})()


def test_a_missing_deployment_is_reported(
    answered: Callable[[str], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error is one sentence."""

    def missing(*_: Any, **__: Any) -> Any:
        raise NotDeployed("stack tidemill-data not found")

    monkeypatch.setattr(stop, "aws_client", lambda _: None)
    monkeypatch.setattr(stop, "read_outputs", missing)
    assert answered("tidemill\n") == 1
    assert capsys.readouterr().err == "stack tidemill-data not found\n"
