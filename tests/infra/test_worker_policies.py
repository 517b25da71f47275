"""A deployment whose workers run elsewhere: no Compute stack, and all that such workers need."""

from __future__ import annotations

import json

import pytest

from tests.infra.conftest import Synth
from tests.infra.reading import Deployment
from tidemill.handler.settings import read_settings
from tidemill.handler.worker.context.config import read_config

# `test_modes` has such a deployment checked in `make test`, too.
pytestmark = pytest.mark.long
MODEL = "tidemill-demo"


@pytest.fixture(scope="module")
def elsewhere(synth: Synth) -> Deployment:
    """Return the stacks of a deployment whose workers run elsewhere."""
    return Deployment(synth({"compute": "none", "reuse": True}))


def test_nothing_starts_workers(elsewhere: Deployment) -> None:
    """There is no stack of them, no plan and no right."""
    assert set(elsewhere.templates) == {"Data", "Api"}
    assert '"ecs:' not in json.dumps(elsewhere.templates)
    assert elsewhere.resources("AWS::SSM::Parameter") == {}


def test_a_worker_may_do_what_one_on_ecs_may(elsewhere: Deployment, synth: Synth) -> None:
    """It has exactly the same permissions, under the same conditions; the policy is unattached."""
    ours = Deployment(synth({"reuse": True}))
    policy = elsewhere.properties("AWS::IAM::ManagedPolicy", "Data")["PoliciesWorkertidemilldemo"]
    assert elsewhere.granted(policy) == ours.grants("WorkertidemilldemoRole", "Compute")
    assert not {"Users", "Groups", "Roles"} & set(policy)


def test_a_launcher_changes_nothing_but_fleets(elsewhere: Deployment) -> None:
    """It reads batches, no keys and no tenants; what it writes is what is remembered of fleets."""
    policy = elsewhere.properties("AWS::IAM::ManagedPolicy", "Data")["PoliciesLauncher"]
    reading = '{"ForAllValues:StringNotLike": {"dynamodb:LeadingKeys": ["KEY*", "TENANT#*"]}}'
    writing = '{"ForAllValues:StringLike": {"dynamodb:LeadingKeys": ["FLEET#*"]}}'
    assert {(it.action, it.condition) for it in elsewhere.granted(policy)} == {
        ("dynamodb:BatchGetItem", reading),
        ("dynamodb:GetItem", reading),
        ("dynamodb:Query", reading),
        ("dynamodb:PutItem", writing),
        ("dynamodb:UpdateItem", writing),
    }


def test_the_outputs_are_all_that_workers_must_know(elsewhere: Deployment) -> None:
    """A launcher and a worker read their settings from the stack's outputs."""
    outputs = elsewhere.outputs("Data")
    variables = json.loads(outputs["WorkerEnvironment"])
    assert set(read_settings(variables).work_queues) == {MODEL}
    assert read_config(variables, {"queue": "q"}).reuse
    assert variables["AWS_REGION"] == "eu-west-1"
    assert set(json.loads(outputs["WorkerPolicyArns"])) == {MODEL}
    assert "PoliciesLauncher" in outputs["LauncherPolicyArn"]
