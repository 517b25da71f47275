"""IAM statements of each role, written by hand, without wildcards in their actions.

Lambdas and workers share a few building blocks; `infra/api` and `infra/compute` combine them for
each role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, get_args

from aws_cdk import Stack
from aws_cdk import aws_iam as iam

from infra.config import Model
from infra.data.stack import DataStack
from infra.data.table import TENANT_INDEX
from tidemill.batch.object_keys import MEDIA_PREFIX

TableAction = Literal["BatchGetItem", "GetItem", "PutItem", "UpdateItem", "DeleteItem", "Query"]

# Prefix of the results that a tenant's later batches reuse.
KEPT_RESULTS: Final = "results/"
# S3 returns "not found" only to callers that may list; for others a missing object is forbidden.
_FIND = "s3:ListBucket"
# Key operations that a service performs for the caller. Parts of an upload and messages are
# encrypted with a data key that KMS generates for the service, and decrypts when it is used again.
_READ, _WRITE = ("Decrypt",), ("Decrypt", "GenerateDataKey")
# AWS lists these for each principal that uses a table, not by operation.
_TABLE = ("Decrypt", "DescribeKey", "Encrypt", "GenerateDataKey", "ReEncryptFrom", "ReEncryptTo")
_KEY_RIGHTS: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    "s3": {"s3:GetObject": _READ, "s3:PutObject": _WRITE},
    "sqs": {"sqs:ReceiveMessage": _READ, "sqs:SendMessage": _WRITE},
    "dynamodb": {f"dynamodb:{action}": _TABLE for action in get_args(TableAction)},
}


def service_principal(stack: Stack, service: str) -> iam.ServicePrincipal:
    """Return the principal of an AWS service that may assume a role for this account only."""
    return iam.ServicePrincipal(
        f"{service}.amazonaws.com",
        conditions={"StringEquals": {"aws:SourceAccount": stack.account}},
    )


def table_items(data: DataStack, *actions: TableAction) -> iam.PolicyStatement:
    """Allow these actions on every item except API keys and tenants."""
    statement = allow([f"dynamodb:{action}" for action in actions], [data.table.table_arn])
    # A role that could write a key could authenticate itself; `read_api_keys` allows reading keys.
    # Tenants have signing secrets; `read_tenants` allows reading those.
    others = {"dynamodb:LeadingKeys": ["KEY*", "TENANT#*"]}
    statement.add_condition("ForAllValues:StringNotLike", others)
    return statement


def live_shards(data: DataStack) -> iam.PolicyStatement:
    """Allow to put, delete and list the live shards of a batch."""
    statement = allow(
        ["dynamodb:PutItem", "dynamodb:DeleteItem", "dynamodb:Query"], [data.table.table_arn]
    )
    statement.add_condition("ForAllValues:StringLike", {"dynamodb:LeadingKeys": ["BATCH#*"]})
    return statement


def list_active(data: DataStack) -> iam.PolicyStatement:
    """Allow to list the active batches, and their places in the order of a tenant's batches."""
    statement = allow(["dynamodb:Query"], [data.table.table_arn])
    statement.add_condition("ForAllValues:StringEquals", {"dynamodb:LeadingKeys": ["ACTIVE"]})
    return statement


def read_tenants(data: DataStack) -> iam.PolicyStatement:
    """Allow to read the settings of tenants, and nothing else in the table."""
    statement = allow(["dynamodb:GetItem"], [data.table.table_arn])
    statement.add_condition("ForAllValues:StringLike", {"dynamodb:LeadingKeys": ["TENANT#*"]})
    return statement


def list_batches(data: DataStack) -> iam.PolicyStatement:
    """Allow to list a tenant's batches."""
    return allow(["dynamodb:Query"], [f"{data.table.table_arn}/index/{TENANT_INDEX}"])


def read_api_keys(data: DataStack) -> iam.PolicyStatement:
    """Allow to read the keys of the API, and nothing else in the table."""
    statement = allow(["dynamodb:GetItem"], [data.table.table_arn])
    statement.add_condition("ForAllValues:StringLike", {"dynamodb:LeadingKeys": ["KEY#*"]})
    return statement


def find_objects(data: DataStack) -> iam.PolicyStatement:
    """Allow to distinguish a missing object from a forbidden one, and to list parts."""
    return allow([_FIND], [data.bucket.bucket_arn])


def read_objects(data: DataStack, *prefixes: str) -> iam.PolicyStatement:
    """Return the permission to read under the prefixes, older versions included."""
    return allow(["s3:GetObject", "s3:GetObjectVersion"], _objects(data, prefixes))


def write_objects(data: DataStack, *prefixes: str) -> iam.PolicyStatement:
    """Return the permission to write under the prefixes, in one piece or in parts."""
    return allow(["s3:PutObject"], _objects(data, prefixes))


def tag_objects(data: DataStack, *prefixes: str) -> iam.PolicyStatement:
    """Allow to tag new objects under the prefixes, which selects their lifecycle rule."""
    return allow(["s3:PutObjectTagging"], _objects(data, prefixes))


def resume_uploads(data: DataStack, *prefixes: str) -> iam.PolicyStatement:
    """Allow to list the parts of a multipart upload that another run started, and to abort it."""
    return allow(
        ["s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"], _objects(data, prefixes)
    )


def delete_objects(data: DataStack, *prefixes: str) -> iam.PolicyStatement:
    """Return the permission to delete under the prefixes; the bucket keeps versions for a while."""
    return allow(["s3:DeleteObject"], _objects(data, prefixes))


def erase_objects(data: DataStack, *prefixes: str) -> list[iam.PolicyStatement]:
    """Return the permissions to list all versions of objects and to delete them permanently."""
    return [
        allow(["s3:ListBucketVersions"], [data.bucket.bucket_arn]),
        allow(["s3:DeleteObject", "s3:DeleteObjectVersion"], _objects(data, prefixes)),
    ]


def send_to_control(data: DataStack) -> iam.PolicyStatement:
    """Allow to send messages to the control queue."""
    return allow(["sqs:SendMessage"], [data.queues.control.queue_arn])


def send_to_workers(data: DataStack) -> iam.PolicyStatement:
    """Allow to send messages to the work queues."""
    return allow(["sqs:SendMessage"], _work_queues(data))


def read_queue_depths(data: DataStack) -> iam.PolicyStatement:
    """Allow to read the depths of the work queues and the intake queue."""
    queues = [*_work_queues(data), data.queues.intake.queue_arn]
    return allow(["sqs:GetQueueAttributes"], queues)


def send_to_intake(data: DataStack) -> iam.PolicyStatement:
    """Allow to send messages to the intake queue."""
    return allow(["sqs:SendMessage"], [data.queues.intake.queue_arn])


def send_to_drops(data: DataStack) -> iam.PolicyStatement:
    """Allow to send messages to the queue of uploads."""
    return allow(["sqs:SendMessage"], [data.queues.drops.queue_arn])


def read_fleets(data: DataStack) -> iam.PolicyStatement:
    """Return the permission to read the fleet plans."""
    arn = Stack.of(data).format_arn(
        service="ssm", resource="parameter", resource_name=data.config.fleets_path.strip("/")
    )
    return allow(["ssm:GetParametersByPath"], [arn])


def publish_events(data: DataStack) -> iam.PolicyStatement:
    """Allow to publish a batch's status to the event bus."""
    return allow(["events:PutEvents"], [data.bus.event_bus_arn])


def consume_work(data: DataStack, model_name: str) -> iam.PolicyStatement:
    """Allow to consume the work queue of one model, and to send to it."""
    return allow(
        [
            "sqs:ReceiveMessage",
            "sqs:DeleteMessage",
            "sqs:ChangeMessageVisibility",
            "sqs:SendMessage",
        ],
        [data.queues.work[model_name].queue_arn],
    )


def _work_queues(data: DataStack) -> list[str]:
    return [queue.queue_arn for queue in data.queues.work.values()]


def worker_statements(data: DataStack, model: Model) -> list[iam.PolicyStatement]:
    """Return all permissions of a worker of one model, wherever it runs."""
    statements = [
        consume_work(data, model.name),
        send_to_control(data),
        table_items(data, "GetItem", "UpdateItem"),
        live_shards(data),
        list_active(data),
        find_objects(data),
        read_objects(data, "input/", "files/", "work/", MEDIA_PREFIX),
        write_objects(data, "work/"),
    ]
    if data.config.reuse is not None:
        statements += [
            read_objects(data, KEPT_RESULTS),
            write_objects(data, KEPT_RESULTS),
            delete_objects(data, KEPT_RESULTS),
        ]
    statements += use_key(data, statements)
    if model.weights_key:
        statements.append(_decrypt(data, model))
    return [*statements, *(right for url in model.prefixes for right in _read_weights(data, url))]


def launcher_statements(data: DataStack) -> list[iam.PolicyStatement]:
    """Return all permissions of an external launcher: to read, and to update its fleets."""
    fleets = allow(["dynamodb:PutItem", "dynamodb:UpdateItem"], [data.table.table_arn])
    fleets.add_condition("ForAllValues:StringLike", {"dynamodb:LeadingKeys": ["FLEET#*"]})
    statements = [table_items(data, "BatchGetItem", "GetItem", "Query"), fleets]
    return [*statements, *use_key(data, statements)]


def use_key(
    data: DataStack, statements: Sequence[iam.PolicyStatement]
) -> list[iam.PolicyStatement]:
    """Return the permissions for services to use the deployment's key for these statements."""
    if data.key is None:
        return []
    allowed = {action for statement in statements for action in statement.actions}
    return [
        _by_service(data, service, data.key.key_arn, rights)
        for service, uses in _KEY_RIGHTS.items()
        if (rights := list(dict.fromkeys(it for use in uses if use in allowed for it in uses[use])))
    ]


def _decrypt(data: DataStack, model: Model) -> iam.PolicyStatement:
    """Return the permission for S3 to decrypt a model's weights with their key, nothing else."""
    region = model.weights_region or Stack.of(data).region
    return _by_service(data, "s3", model.weights_key, ["Decrypt"], region)


def _by_service(
    data: DataStack, service: str, key_arn: str, rights: Sequence[str], region: str = ""
) -> iam.PolicyStatement:
    """Return the permission for one service of a region to use a key, and nothing else."""
    stack = Stack.of(data)
    statement = allow([f"kms:{right}" for right in rights], [key_arn])
    statement.add_condition(
        "StringEquals",
        {"kms:ViaService": f"{service}.{region or stack.region}.{stack.url_suffix}"},
    )
    return statement


def _read_weights(data: DataStack, url: str) -> list[iam.PolicyStatement]:
    """Return the permission to list and read the objects under a prefix of model weights."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    arn, prefix = f"arn:{Stack.of(data).partition}:s3:::{bucket}", f"{prefix.strip('/')}/"
    listing = allow([_FIND], [arn])
    listing.add_condition("StringLike", {"s3:prefix": [f"{prefix}*"]})
    return [listing, allow(["s3:GetObject"], [f"{arn}/{prefix}*"])]


def _objects(data: DataStack, prefixes: Sequence[str]) -> list[str]:
    return [data.bucket.arn_for_objects(f"{prefix}*") for prefix in prefixes]


def allow(
    actions: Sequence[str],
    resources: Sequence[str],
    conditions: Mapping[str, Mapping[str, str]] | None = None,
) -> iam.PolicyStatement:
    """Return a statement that allows these actions on these resources."""
    return iam.PolicyStatement(
        actions=list(actions), resources=list(resources), conditions=conditions
    )
