"""Every role may do what its code does and nothing more, to its own resources and no others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from tests.infra.calls import needed_by
from tests.infra.compute.kinds import JOBS, KEY_OF_WEIGHTS, SHORT, SIGNED
from tests.infra.conftest import Synth
from tests.infra.reading import Deployment, Template, each
from tidemill.handler.settings import read_settings
from tidemill.handler.worker.context.config import read_config

TABLE, BUCKET = "BatchesTable.Arn", "DropsBucket.Arn"
CONTROL, DEAD = "DoorbellsControl.Arn", "DoorbellsDeadLetters.Arn"
INTAKE, DROPS = "DoorbellsIntake.Arn", "DoorbellsDrops.Arn"
WORK = "DoorbellsWorktidemilldemo.Arn"
FLEETS = "arn:aws:ssm:eu-west-1:111122223333:parameter/tidemill/tidemill/fleets"
OUTPUT, FILES = f"{BUCKET}/output/*", f"{BUCKET}/files/*"
INPUT, IN_FLIGHT = f"{BUCKET}/input/*", f"{BUCKET}/work/*"
KEPT = f"{BUCKET}/results/*"
REUSE = ("TIDEMILL_REUSE", "TIDEMILL_REUSE_SAMPLED", "TIDEMILL_REUSE_MAX_SIZE")

# What Lambda itself does for a function that a queue calls.
FED = "sqs:ReceiveMessage ChangeMessageVisibility GetQueueUrl DeleteMessage GetQueueAttributes"
TO_END_BATCHES = {
    CONTROL: "sqs:SendMessage",
    WORK: "sqs:SendMessage",
    "EventsBus.Arn": "events:PutEvents",
    OUTPUT: "s3:PutObject",
    FILES: "s3:PutObject",
}
OBJECT = "s3:GetObject GetObjectVersion PutObject"
RESUMED = f"{OBJECT} AbortMultipartUpload ListMultipartUploadParts"
RESULT = f"{RESUMED} DeleteObject"
# What each role may do to which resource.
ROLES = {
    "ControlRole": TO_END_BATCHES
    | {
        FLEETS: "ssm:GetParametersByPath",
        TABLE: "dynamodb:BatchGetItem GetItem PutItem UpdateItem DeleteItem Query",
        CONTROL: f"{FED} SendMessage",
        INTAKE: "sqs:SendMessage",
        DROPS: f"{FED} SendMessage",
        BUCKET: "s3:ListBucket",
        INPUT: "s3:GetObject GetObjectVersion",
        IN_FLIGHT: RESUMED,
        OUTPUT: RESULT,
        FILES: f"{RESULT} PutObjectTagging",
    },
    "IntakeRole": TO_END_BATCHES
    | {
        FLEETS: "ssm:GetParametersByPath",
        TABLE: "dynamodb:GetItem PutItem UpdateItem DeleteItem Query",
        INTAKE: f"{FED} SendMessage",
        BUCKET: "s3:ListBucket",
        INPUT: "s3:GetObject GetObjectVersion",
        IN_FLIGHT: RESUMED,
        OUTPUT: RESULT,
        FILES: f"{RESULT} PutObjectTagging",
    },
    "ReaperRole": TO_END_BATCHES
    | {
        INTAKE: "sqs:SendMessage GetQueueAttributes",
        FLEETS: "ssm:GetParametersByPath",
        TABLE: "dynamodb:BatchGetItem GetItem PutItem UpdateItem DeleteItem Query",
        WORK: "sqs:SendMessage GetQueueAttributes",
    },
    "DeadLettersRole": TO_END_BATCHES
    | {
        TABLE: "dynamodb:GetItem UpdateItem DeleteItem",
        DEAD: FED,
        INTAKE: "sqs:SendMessage",
        DROPS: "sqs:SendMessage",
    },
    "ApiRole": {
        TABLE: "dynamodb:BatchGetItem GetItem PutItem UpdateItem DeleteItem Query",
        f"{TABLE}/index/by_tenant": "dynamodb:Query",
        CONTROL: "sqs:SendMessage",
        "EventsBus.Arn": "events:PutEvents",
        BUCKET: "s3:ListBucket",
        INPUT: "s3:GetObject GetObjectVersion",
        IN_FLIGHT: "s3:GetObject GetObjectVersion",
        OUTPUT: f"{OBJECT} DeleteObject",
        FILES: f"{RESULT} PutObjectTagging",
        f"{BUCKET}/work/uploads/*": "s3:PutObject DeleteObject",
    },
    "ScheduleRole": {
        "ReaperFunction.Arn": "lambda:InvokeFunction",
        "DoorbellsUndeliverable.Arn": "sqs:SendMessage",
    },
    "WorkertidemilldemoRole": {
        TABLE: "dynamodb:GetItem UpdateItem PutItem DeleteItem Query",
        WORK: "sqs:ReceiveMessage ChangeMessageVisibility DeleteMessage SendMessage",
        CONTROL: "sqs:SendMessage",
        BUCKET: "s3:ListBucket",
        INPUT: "s3:GetObject GetObjectVersion",
        FILES: "s3:GetObject GetObjectVersion",
        f"{BUCKET}/media/*": "s3:GetObject GetObjectVersion",
        IN_FLIGHT: OBJECT,
    },
}
# The module whose code runs under a role.
CODE = {
    "ControlRole": "tidemill.handler.lambdas.control",
    "IntakeRole": "tidemill.handler.lambdas.intake",
    "ReaperRole": "tidemill.handler.lambdas.reaper",
    "DeadLettersRole": "tidemill.handler.lambdas.dead_letters",
    "ApiRole": "tidemill.handler.lambdas.api",
    "WorkertidemilldemoRole": "tidemill.handler.worker.worker",
}
FUNCTION_ROLES = {
    role for role, module in CODE.items() if module.startswith("tidemill.handler.lambdas.")
}
FED_ROLES = {"ControlRole", "DeadLettersRole", "IntakeRole"}
READ_TENANTS = {"ApiRole", "ControlRole", "IntakeRole", "ReaperRole"}
ERASED = "ListBucketVersions DeleteObjectVersion"
# What starts workers and reads how they ended: given with them, where a deployment has any.
OF_LAUNCHERS = (
    ("ecs", "describe_tasks"),
    ("ecs", "list_tasks"),
    ("ecs", "run_task"),
    ("ecs", "stop_task"),
    ("kubernetes", "create_job"),
    ("kubernetes", "delete_job"),
    ("kubernetes", "list_jobs"),
    ("kubernetes", "list_pods"),
    ("logs", "get_log_events"),
    ("sagemaker", "create_training_job"),
    ("sagemaker", "list_training_jobs"),
    ("sagemaker", "stop_training_job"),
)
# What a client's method needs of IAM, where that is not a right of the same name.
RIGHTS = {
    ("dynamodb", "transact_write_items"): "",
    **dict.fromkeys(OF_LAUNCHERS, ""),
    ("s3", "abort_multipart_upload"): "s3:AbortMultipartUpload",
    ("s3", "complete_multipart_upload"): "s3:PutObject",
    ("s3", "create_multipart_upload"): "s3:PutObject",
    # Without the second a missing object is a forbidden one.
    ("s3", "delete_objects"): "s3:DeleteObject",
    ("s3", "head_object"): "s3:GetObject ListBucket",
    ("s3", "list_objects_v2"): "s3:ListBucket",
    ("s3", "list_object_versions"): "s3:ListBucketVersions",
    ("s3", "list_parts"): "s3:ListMultipartUploadParts",
    ("s3", "upload_part"): "s3:PutObject",
    ("s3", "upload_part_copy"): "s3:GetObject PutObject",
    ("sqs", "send_message_batch"): "sqs:SendMessage",
}
# The source's reason where an argument needs more than the method does.
RIGHTS_OF_TEXTS = {
    "Put": "dynamodb:PutItem",
    "Update": "dynamodb:UpdateItem",
    "Delete": "dynamodb:DeleteItem",
    "ConditionCheck": "dynamodb:ConditionCheckItem",
    "Tagging": "s3:PutObjectTagging",
    "VersionId": "s3:GetObjectVersion",
}
# Calls that AWS does not allow to be restricted to a resource.
RESOURCELESS = {
    "cloudwatch:PutMetricData",
    "ec2:DescribeDhcpOptions",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSubnets",
    "ec2:DescribeVpcs",
    "ecr:GetAuthorizationToken",
    "ecs:DiscoverPollEndpoint",
    "ecs:ListTasks",
    "sagemaker:ListTrainingJobs",
    "xray:PutTelemetryRecords",
    "xray:PutTraceSegments",
}
# EventBridge documents no condition for topics; who abuses that can send us a message.
OPEN_TO_SERVICES = {("EventsAlarms", "events.amazonaws.com")}


@pytest.fixture(scope="module")
def deployment(templates: dict[str, Template]) -> Deployment:
    """Return the deployment of infra/config.toml."""
    return Deployment(templates)


OTHERS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "asg and iam": SIGNED,
    "jobs, isolated": JOBS["jobs, isolated"],
}


@pytest.fixture(scope="module", params=OTHERS)
def any_deployment(request: pytest.FixtureRequest, synth: Synth) -> Deployment:
    """Return each kind of deployment in turn."""
    return Deployment(synth(OTHERS[request.param]))


def rights(words: str) -> set[str]:
    """Return actions of IAM, of which only the first names its service."""
    service, _, names = words.partition(":")
    return {f"{service}:{name}" for name in names.split()}


def own(role: str) -> set[tuple[str, str]]:
    """Return what the table above says of a role, as pairs of action and resource."""
    logs = f"{role.removesuffix('Role')}Logs.Arn"
    written = {"logs:CreateLogStream", "logs:PutLogEvents"} if role in FUNCTION_ROLES else set()
    return {
        *(
            (action, resource)
            for resource, words in ROLES[role].items()
            for action in rights(words)
        ),
        *((action, logs) for action in written),
    }


@pytest.mark.parametrize("role", ROLES)
def test_a_role_reaches_its_own(deployment: Deployment, role: str) -> None:
    """Each role has the rights of the table, on those resources, and has no others."""
    own_stack = "Compute" if role.startswith("Worker") else "Api"
    found = {(grant.action, grant.resource) for grant in deployment.grants(role, own_stack)}
    assert found == own(role)


@pytest.mark.parametrize("role", CODE)
def test_a_role_may_do_what_its_code_does(role: str) -> None:
    """Every right is used by a call in the source, and every call in the source has its rights."""
    needed = needed_by(CODE[role])
    used = rights(FED) if role in FED_ROLES else set()
    for service, method in needed.calls:
        camel = "".join(word.capitalize() for word in method.split("_"))
        used |= rights(RIGHTS.get((service, method), f"{service}:{camel}"))
    for text in needed.texts & set(RIGHTS_OF_TEXTS):
        used |= rights(RIGHTS_OF_TEXTS[text])
    if ("s3", "list_object_versions") in needed.calls:
        used -= rights(f"s3:{ERASED}")  # which it has where a deployment erases
    if role.startswith("Worker"):
        used -= {"s3:DeleteObject"}  # which it has where a deployment keeps results
    assert {action for words in ROLES[role].values() for action in rights(words)} == used


def test_only_a_deployment_that_erases_has_the_rights_for_it(
    deployment: Deployment, synth: Synth
) -> None:
    """One role may list and permanently delete versions, of objects only."""
    found = Deployment(synth(SHORT))
    for role in FUNCTION_ROLES:
        more = {
            (grant.action, grant.resource)
            for grant in found.grants(role, "Api") - deployment.grants(role, "Api")
        }
        everything = (INPUT, IN_FLIGHT, OUTPUT, FILES, KEPT)
        objects = {("s3:DeleteObjectVersion", it) for it in everything}
        objects |= {("s3:DeleteObject", it) for it in (INPUT, IN_FLIGHT, KEPT)}
        listing = {("s3:ListBucketVersions", BUCKET)}
        assert more == (objects | listing if role == "ControlRole" else set()), role
    for function in found.properties("AWS::Lambda::Function").values():
        assert read_settings(function["Environment"]["Variables"]).erase_batches


def test_only_a_deployment_that_keeps_results_has_the_rights_for_it(
    deployment: Deployment, synth: Synth
) -> None:
    """Its workers read, write and delete kept results, and may do nothing else than without."""
    found, role = Deployment(synth({"reuse": True})), "WorkertidemilldemoRole"
    more = found.grants(role, "Compute") - deployment.grants(role, "Compute")
    assert {(grant.action, grant.resource) for grant in more} == {
        (f"s3:{action}", KEPT)
        for action in ("GetObject", "GetObjectVersion", "PutObject", "DeleteObject")
    }
    for task in found.properties("AWS::ECS::TaskDefinition").values():
        variables = {
            it["Name"]: it["Value"] for it in task["ContainerDefinitions"][0]["Environment"]
        }
        config = read_config({name: variables[name] for name in REUSE}, {"queue": "q"})
        assert (config.reuse, config.reuse_sampled, config.reuse_max_size) == (True, False, 2**34)


def test_only_the_api_lists_tenants() -> None:
    """Only the role whose code queries the index by tenant may query it."""
    asking = {role for role, module in CODE.items() if "IndexName" in needed_by(module).texts}
    assert asking == {role for role in ROLES if f"{TABLE}/index/by_tenant" in ROLES[role]}
    assert asking == {"ApiRole"}


@pytest.mark.parametrize("role", CODE)
def test_keys_and_tenants_are_read_by_those_who_need_them(
    deployment: Deployment, role: str
) -> None:
    """Only the API sees keys, and no role changes them; limits of tenants are seen by three."""
    found = {
        (grant.condition, grant.action)
        for grant in deployment.grants(role)
        if grant.resource == TABLE
    }
    only = '{"ForAllValues:StringLike": {"dynamodb:LeadingKeys": ["%s#*"]}}'
    others = '{"ForAllValues:StringNotLike": {"dynamodb:LeadingKeys": ["KEY*", "TENANT#*"]}}'
    get = "dynamodb:GetItem"
    theirs = {(only % "TENANT", get)} if role in READ_TENANTS else set()
    theirs |= {(only % "KEY", get)} if role == "ApiRole" else set()
    if role.startswith("Worker"):  # which makes and deletes nothing but what is of a batch
        shards = '{"ForAllValues:StringLike": {"dynamodb:LeadingKeys": ["BATCH#*"]}}'
        theirs |= {(shards, f"dynamodb:{it}") for it in ("PutItem", "DeleteItem", "Query")}
        active = '{"ForAllValues:StringEquals": {"dynamodb:LeadingKeys": ["ACTIVE"]}}'
        theirs |= {(active, "dynamodb:Query")}
    assert {pair for pair in found if pair[0] != others} == theirs


def test_no_statement_has_a_wildcard_among_its_actions(any_deployment: Deployment) -> None:
    """Every right is written out, and none is given by leaving others out."""
    for name, statement in any_deployment.statements():
        assert statement["Effect"] == "Allow", name
        assert not {"NotAction", "NotResource"} & set(statement), name
        assert not [action for action in each(statement["Action"]) if "*" in action], name


def test_a_right_on_everything_is_one_that_knows_no_resources(any_deployment: Deployment) -> None:
    """`*` alone is the resource of nothing that could have another."""
    found = {
        action
        for _, statement in any_deployment.statements()
        if "*" in each(statement["Resource"])
        for action in each(statement["Action"])
    }
    assert found <= RESOURCELESS


def test_a_wildcard_in_a_resource_is_its_last_part(any_deployment: Deployment) -> None:
    """A resource may be all under a prefix or of a cluster, never one of several buckets."""
    resources = {
        resource
        for _, statement in any_deployment.statements()
        for resource in each(statement["Resource"])
        if resource != "*"
    }
    assert not [resource for resource in resources if "*" in resource[:-1]]
    assert not [resource for resource in resources if resource.endswith(f"{BUCKET}/*")]
    starred = [resource for resource in resources if resource.endswith("*")]
    assert starred
    assert [
        resource for resource in starred if not resource.endswith(("/*", ":*", "/tidemill-*"))
    ] == []


def test_only_ecs_infrastructure_has_a_managed_policy(any_deployment: Deployment) -> None:
    """The one role with a policy that AWS keeps is the one by which ECS starts machines."""
    managed = {
        name: policies
        for name, role in any_deployment.properties("AWS::IAM::Role").items()
        if (policies := role.get("ManagedPolicyArns"))
    }
    assert managed in (
        {},
        {
            "MachinesStarter": [
                "arn:aws:iam::aws:policy/AmazonECSInfrastructureRolePolicyForManagedInstances"
            ]
        },
    )


def test_every_role_is_for_one_service(any_deployment: Deployment) -> None:
    """Only the service that a role is for may assume it: no account and no user."""
    for name, role in any_deployment.properties("AWS::IAM::Role").items():
        (statement,) = role["AssumeRolePolicyDocument"]["Statement"]
        assert list(statement["Principal"]) == ["Service"], name
        assert str(statement["Principal"]["Service"]).endswith(".amazonaws.com"), name


def test_a_service_takes_a_role_for_this_account_alone(any_deployment: Deployment) -> None:
    """Machine roles are the exception: EC2 and ECS name no account when they assume them."""
    unbound = {
        name
        for name, role in any_deployment.properties("AWS::IAM::Role").items()
        for statement in role["AssumeRolePolicyDocument"]["Statement"]
        if statement.get("Condition") != {"StringEquals": {"aws:SourceAccount": "111122223333"}}
    }
    assert unbound <= {"MachinesRole", "MachinesStarter"}


def test_no_policy_of_a_resource_lets_strangers_in(any_deployment: Deployment) -> None:
    """Queues, topic and bucket allow AWS's services something, each for this account's sake."""
    allowed = [
        (name, statement)
        for kind in ("AWS::SQS::QueuePolicy", "AWS::SNS::TopicPolicy", "AWS::S3::BucketPolicy")
        for name, policy in any_deployment.properties(kind).items()
        for statement in policy["PolicyDocument"]["Statement"]
        if statement["Effect"] == "Allow"
    ]
    assert allowed
    for name, statement in allowed:
        service = statement["Principal"]["Service"]
        if (name.removesuffix("Policy"), service) not in OPEN_TO_SERVICES:
            assert _is_bound(statement["Condition"]), name


def test_only_the_gateway_calls_the_api(any_deployment: Deployment) -> None:
    """A function that may be called from outside is called by this API and no other."""
    permissions = any_deployment.properties("AWS::Lambda::Permission").values()
    assert permissions
    for permission in permissions:
        assert permission["Principal"] == "apigateway.amazonaws.com"
        assert ":HttpApi/" in permission["SourceArn"]


def test_weights_are_read_from_their_prefix(revised: Deployment) -> None:
    """A worker sees those of its model and adapters, and nothing else of their buckets."""
    foreign = {
        (grant.action, grant.resource, grant.condition)
        for grant in revised.grants("WorkerlargeRole")
        if ":s3:::" in grant.resource
    }
    assert foreign == {
        (
            "s3:ListBucket",
            "arn:aws:s3:::weights",
            '{"StringLike": {"s3:prefix": ["large/v2/*"]}}',
        ),
        ("s3:GetObject", "arn:aws:s3:::weights/large/v2/*", ""),
        ("s3:ListBucket", "arn:aws:s3:::tuned", '{"StringLike": {"s3:prefix": ["sql/*"]}}'),
        ("s3:GetObject", "arn:aws:s3:::tuned/sql/*", ""),
    }


def test_a_key_decrypts_weights_for_s3_alone(revised: Deployment) -> None:
    """It is used where it is configured: by S3 of the weights' region, and for nothing else."""
    [grant] = (it for it in revised.grants("WorkersecretRole") if it.action == "kms:Decrypt")
    assert grant.resource == KEY_OF_WEIGHTS
    [service] = json.loads(grant.condition)["StringEquals"].items()
    assert service[0] == "kms:ViaService"
    assert "s3.us-west-2." in str(service[1])


def _is_bound(condition: dict[str, dict[str, Any]]) -> bool:
    """Say whether a condition names this account or a resource in it."""
    values: Iterable[str] = (
        value
        for operator, keys in condition.items()
        if operator in {"StringEquals", "ArnEquals", "ArnLike"}
        for key, value in keys.items()
        if key in {"aws:SourceAccount", "aws:SourceArn"}
    )
    return any(value == "111122223333" or value.endswith(".Arn") for value in values)
