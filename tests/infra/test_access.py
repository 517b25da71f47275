"""Requirements of organisations on every resource: a key, tags, traces, a boundary and path."""

from __future__ import annotations

import json

import pytest

from tests.infra.conftest import Synth
from tests.infra.reading import Deployment, Template

KEY = "arn:aws:kms:eu-west-1:111122223333:key/abc"
BOUNDARY = "arn:aws:iam::111122223333:policy/teams/boundary"
OF_IAM = ("AWS::IAM::Role", "AWS::IAM::ManagedPolicy", "AWS::IAM::InstanceProfile")


@pytest.fixture(scope="module")
def bounded(synth: Synth) -> Deployment:
    """Return a deployment with all of it."""
    return Deployment(
        synth(
            {
                "kms_key": KEY,
                "tracing": True,
                "permissions_boundary": BOUNDARY,
                "role_path": "/platform/llm/",
                "tags": {"cost-center": "4711", "owner": "ml platform"},
            }
        )
    )


def test_a_boundary_bounds_every_role_under_its_path(bounded: Deployment) -> None:
    """The path applies to policies and profiles, too; nothing else conflicts with either."""
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
    """They are added to the deployment's own tag; without any, there is that alone."""

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


def test_a_key_encrypts_what_is_kept(bounded: Deployment) -> None:
    """Bucket, table, queues, topic and logs are encrypted by it, at few requests to KMS."""
    [rule] = bounded.properties("AWS::S3::Bucket")["DropsBucket"]["BucketEncryption"][
        "ServerSideEncryptionConfiguration"
    ]
    assert rule == {
        "BucketKeyEnabled": True,
        "ServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": KEY},
    }
    [table] = bounded.properties("AWS::DynamoDB::Table").values()
    assert table["SSESpecification"] == {
        "SSEEnabled": True,
        "SSEType": "KMS",
        "KMSMasterKeyId": KEY,
    }
    for kind, name in (
        ("AWS::SQS::Queue", "KmsMasterKeyId"),
        ("AWS::SNS::Topic", "KmsMasterKeyId"),
        ("AWS::Logs::LogGroup", "KmsKeyId"),
    ):
        assert {it.get(name) for it in bounded.properties(kind).values()} == {KEY}
    queues = bounded.properties("AWS::SQS::Queue").values()
    assert {it["KmsDataKeyReusePeriodSeconds"] for it in queues} == {3600}


# By the services that a role uses: what it may have each do with the key.
READ, WRITE = "Decrypt", "Decrypt GenerateDataKey"
TABLE = "Decrypt DescribeKey Encrypt GenerateDataKey ReEncryptFrom ReEncryptTo"
KEY_USES = {
    "ControlRole": {"s3": WRITE, "sqs": WRITE, "dynamodb": TABLE, "": READ},
    "IntakeRole": {"s3": WRITE, "sqs": WRITE, "dynamodb": TABLE, "": READ},
    "ReaperRole": {"s3": WRITE, "sqs": WRITE, "dynamodb": TABLE},
    "DeadLettersRole": {"s3": WRITE, "sqs": WRITE, "dynamodb": TABLE, "": READ},
    "ApiRole": {"s3": WRITE, "sqs": WRITE, "dynamodb": TABLE},
    "ScheduleRole": {"sqs": WRITE},
    "WorkertidemilldemoRole": {"s3": WRITE, "sqs": WRITE, "dynamodb": TABLE},
}


def test_a_role_has_services_use_the_key(bounded: Deployment) -> None:
    """Each by the services that it uses alone; Lambda decrypts what it hands on of queues."""
    found: dict[str, dict[str, set[str]]] = {}
    for role in bounded.properties("AWS::IAM::Role"):
        for grant in bounded.grants(role):
            if grant.action.startswith("kms:"):
                assert grant.resource == KEY
                condition = json.loads(grant.condition or "{}")
                via = condition.get("StringEquals", {}).get("kms:ViaService", "")
                if via:
                    assert via.endswith(".eu-west-1.amazonaws.com")
                service = via.partition(".")[0]
                uses = found.setdefault(role, {}).setdefault(service, set())
                uses.add(grant.action.removeprefix("kms:"))
    assert found == {
        role: {service: set(words.split()) for service, words in uses.items()}
        for role, uses in KEY_USES.items()
    }


def test_functions_are_traced_if_configured(
    bounded: Deployment, templates: dict[str, Template]
) -> None:
    """Lambda writes the traces itself: nothing more is imported."""
    for found, mode in ((bounded, {"Mode": "Active"}), (Deployment(templates), None)):
        functions = found.properties("AWS::Lambda::Function").values()
        assert [it.get("TracingConfig") for it in functions] == [mode] * len(functions)
