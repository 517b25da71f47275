"""What an organisation asks of every resource: tags, a permissions boundary, a path of roles."""

from __future__ import annotations

import pytest
from aws_cdk.assertions import Template

from tests.infra.conftest import Synth
from tests.infra.reading import Deployment

BOUNDARY = "arn:aws:iam::111122223333:policy/teams/boundary"
OF_IAM = ("AWS::IAM::Role", "AWS::IAM::ManagedPolicy", "AWS::IAM::InstanceProfile")


@pytest.fixture(scope="module")
def bounded(synth: Synth) -> Deployment:
    """Return a deployment with all three."""
    return Deployment(
        synth(
            {
                "permissions_boundary": BOUNDARY,
                "role_path": "/platform/llm/",
                "tags": {"cost-center": "4711", "owner": "ml platform"},
            }
        )
    )


def test_a_boundary_bounds_every_role_under_its_path(bounded: Deployment) -> None:
    """The path is also that of policies and profiles; nothing else stands in either's way."""
    roles = bounded.properties("AWS::IAM::Role")
    assert len(roles) > 8
    assert {role["PermissionsBoundary"] for role in roles.values()} == {BOUNDARY}
    found = [it for kind in OF_IAM for it in bounded.properties(kind).values()]
    assert len(found) > len(roles) + 1
    assert {it["Path"] for it in found} == {"/platform/llm/"}


def test_ecs_may_pass_the_role_of_machines_under_a_path(bounded: Deployment) -> None:
    """AWS's own policy allows that for roles without a path alone."""
    [passed] = (it for it in bounded.grants("MachinesStarter") if it.action == "iam:PassRole")
    assert passed.resource == "MachinesRole.Arn"
    assert passed.condition == '{"StringLike": {"iam:PassedToService": "ec2.*"}}'


def test_tags_are_on_everything_that_has_some(
    bounded: Deployment, templates: dict[str, Template]
) -> None:
    """They stand beside the deployment's own tag; without any, there is that alone."""

    def tags(found: Deployment) -> list[dict[str, str]]:
        return [
            dict(tags) if isinstance(tags, dict) else {it["Key"]: it["Value"] for it in tags}
            for template in found.templates.values()
            for resource in template["Resources"].values()
            if "tidemill" in str(tags := resource.get("Properties", {}).get("Tags", ""))
        ]

    wanted = {"tidemill": "tidemill", "cost-center": "4711", "owner": "ml platform"}
    assert len(tags(bounded)) == len(tags(Deployment(templates))) > 40
    assert [it for it in tags(bounded) if not wanted.items() <= it.items()] == []
    assert [it for it in tags(Deployment(templates)) if it.keys() & {"cost-center", "owner"}] == []
