"""`tidemill workers`, typed, against fleets of processes on an emulator."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cli.place import cells_of, typed
from tests.emulators import Emulator, deployment_of
from tidemill.batch.fleet import CircuitBreaker, FleetPlan, FleetState, Worker
from tidemill.cli.main import main
from tidemill.handler.aws.parameters import plan_text
from tidemill.handler.aws.sync import Aws
from tidemill.handler.deployment import Deployment
from tidemill.handler.fleet.launchers import ProcessLauncher

PLAN = FleetPlan("demo", "processes", "r:1", max_workers=4)
BREAKER = CircuitBreaker(1_800_000_000, "r:1", "crash_loop", "They die.", "Mend it.")


class Fleets:
    """A deployment that the environment names, and its fleets."""

    def __init__(self, emulator: Emulator, set_variable: Callable[[str, str], None]) -> None:
        resources = emulator.create()
        path = f"/{resources.table}/fleets"
        for name, value in emulator.environment.items():
            set_variable(name, value)
        set_variable("TIDEMILL_TABLE", resources.table)
        set_variable("TIDEMILL_FLEETS", path)
        self.aws = Aws(emulator.client)
        self.deployment: Deployment = deployment_of(resources, fleets=path)
        for plan in (PLAN, FleetPlan("other", "processes", "arn:x/r:9")):
            self.aws.clients["ssm"].put_parameter(
                Name=f"{path}/{plan.model}", Value=plan_text(plan), Type="String"
            )
        for number in (1, 2):
            self.aws.run(self.launcher.start(PLAN, number))

    @property
    def launcher(self) -> ProcessLauncher:
        """Return what starts workers."""
        return ProcessLauncher(self.deployment.processes)

    @property
    def workers(self) -> list[Worker]:
        """Return the workers there are."""
        return self.aws.run(self.launcher.list_workers(PLAN))

    @property
    def state(self) -> FleetState:
        """Return what is remembered of them."""
        return self.aws.run(self.deployment.fleets.get_state("demo"))

    def trip(self) -> None:
        """Open the circuit breaker."""
        self.aws.run(self.deployment.fleets.change("demo", lambda _: FleetState(breaker=BREAKER)))


@pytest.fixture
def fleets(ministack: Emulator, monkeypatch: pytest.MonkeyPatch) -> Fleets:
    """Return a deployment with two workers that start."""
    return Fleets(ministack, monkeypatch.setenv)


def test_each_model_has_a_line(fleets: Fleets, capsys: pytest.CaptureFixture[str]) -> None:
    """How many workers there are of each status, the most there may be, and why no more."""
    fleets.trip()
    status, out, _ = typed(capsys, "workers", "list")
    assert status == 0
    heads, demo, other = cells_of(out)
    assert heads[0] == "MODEL"
    assert demo[:6] == ["demo", "r:1", "2", "0", "0", "4"]
    assert demo[6] == "crash_loop since 2027-01-15 08:00 UTC: They die. Mend it."
    assert other == ["other", "r:9", "0", "0", "0", "1", "when there is work"]


def test_workers_are_stopped_and_resumed(
    fleets: Fleets, capsys: pytest.CaptureFixture[str]
) -> None:
    """All workers are stopped, and none starts until `resume`."""
    status, _, err = typed(capsys, "workers", "stop", "demo")
    assert status == 0
    assert "2 workers of demo" in err
    assert {worker.status for worker in fleets.workers} == {"stopping"}
    breaker = fleets.state.breaker
    assert breaker is not None
    assert (breaker.code, breaker.release) == ("stopped", "r:1")
    assert "0 workers" in typed(capsys, "workers", "stop", "demo")[2]
    assert typed(capsys, "workers", "resume", "demo")[0] == 0
    assert fleets.state.breaker is None


def test_a_crash_loop_is_resumed(fleets: Fleets, capsys: pytest.CaptureFixture[str]) -> None:
    """A second call changes nothing."""
    fleets.trip()
    for _ in range(2):
        assert typed(capsys, "workers", "resume", "demo")[0] == 0
        assert fleets.state == FleetState()


def test_a_model_without_workers_is_named(
    fleets: Fleets, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error lists the deployment's models."""
    for action in ("stop", "resume"):
        status, _, err = typed(capsys, "workers", action, "dmeo")
        assert status == 2
        assert "dmeo" in err
        assert "demo, other" in err
    assert fleets.state == FleetState()


@pytest.mark.usefixtures("fleets")
def test_a_deployment_without_fleets(capsys: pytest.CaptureFixture[str]) -> None:
    """The message says it, and standard output is empty."""
    status, out, err = typed(capsys, "workers", "list", "--fleets", "/nothing/here")
    assert (status, out) == (0, "")
    assert "does not start workers" in err


@pytest.mark.usefixtures("fleets")
def test_a_table_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, and no traceback."""
    assert main(["workers", "list", "--table", "nothing"]) == 1
    assert "cannot be accessed" in capsys.readouterr().err
