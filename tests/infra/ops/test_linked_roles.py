"""Roles that AWS's own services need: made where they are missing, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from infra.ops import linked_roles
from infra.ops.linked_roles import SERVICES, RolesRefused, make_roles
from tests.emulators import Emulator

ROLE = "AWSServiceRoleForECS"
TAKEN = f"Service role name {ROLE} has been taken in this account, please try a different suffix."


class Iam:
    """IAM, which refuses some services' roles with a code and a message."""

    def __init__(self, refused: dict[str, tuple[str, str]]) -> None:
        self._refused = refused
        self.services: list[str] = []

    def create_service_linked_role(self, **arguments: Any) -> dict[str, Any]:
        """Make a role, or say why not."""
        service = arguments["AWSServiceName"]
        self.services.append(service)
        if service in self._refused:
            code, message = self._refused[service]
            error = {"Error": {"Code": code, "Message": message}}
            raise ClientError(error, "CreateServiceLinkedRole")
        return {"Role": {}}


def test_roles_of_the_services_are_made() -> None:
    """The first cluster, Spot machine and group of an account need them at once."""
    made = make_roles(Iam({}))
    assert made == list(SERVICES)
    assert set(made) == {
        "ecs.amazonaws.com",
        "ecs-compute.amazonaws.com",
        "spot.amazonaws.com",
        "autoscaling.amazonaws.com",
    }


def test_roles_that_are_there_are_left() -> None:
    """IAM reports them by a message; the others are created all the same."""
    assert make_roles(Iam({"ecs.amazonaws.com": ("InvalidInput", TAKEN)})) == list(SERVICES[1:])
    assert make_roles(Iam(dict.fromkeys(SERVICES, ("InvalidInput", TAKEN)))) == []


def test_a_missing_permission_for_roles_is_explained() -> None:
    """Every service was tried before, and the command to run names each remaining one."""
    iam = Iam({"spot.amazonaws.com": ("AccessDenied", "User: me is not authorized")})
    with pytest.raises(RolesRefused) as refused:
        make_roles(iam)
    assert iam.services == list(SERVICES)
    words = str(refused.value)
    assert "iam:CreateServiceLinkedRole" in words
    assert "  aws iam create-service-linked-role --aws-service-name spot.amazonaws.com" in words
    assert "ecs.amazonaws.com" not in words


def test_another_refusal_is_not_an_existing_role() -> None:
    """An invalid input, or a throttled call, must not pass for success."""
    for code in ("InvalidInput", "Throttling"):
        with pytest.raises(ClientError, match=code):
            make_roles(Iam({"ecs.amazonaws.com": (code, "Something else is wrong.")}))


def test_bootstrapping_twice_is_once(
    ministack: Emulator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command itself, in an account: the second time all roles are there."""
    for name, value in ministack.environment.items():
        monkeypatch.setenv(name, value)
    assert [linked_roles.main(), linked_roles.main()] == [0, 0]
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "service-linked roles: all exist"
    assert err == ""
