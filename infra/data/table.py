"""The table: the source of truth about batches, shards, files and keys."""

from __future__ import annotations

from aws_cdk import RemovalPolicy
from aws_cdk import aws_dynamodb as dynamodb
from aws_cdk import aws_kms as kms
from constructs import Construct

TENANT_INDEX = "by_tenant"


class BatchTable(Construct):
    """A DynamoDB table with on-demand billing; retained with its stack, restorable for 35 days."""

    def __init__(self, scope: Construct, construct_id: str, *, key: kms.IKey | None) -> None:
        super().__init__(scope, construct_id)
        self.table = dynamodb.Table(
            self,
            "Table",
            partition_key=_text("pk"),
            sort_key=_text("sk"),
            billing_mode=dynamodb.BillingMode.PAY_PER_REQUEST,
            encryption=dynamodb.TableEncryption.CUSTOMER_MANAGED
            if key
            else dynamodb.TableEncryption.AWS_MANAGED,
            encryption_key=key,
            point_in_time_recovery_specification=dynamodb.PointInTimeRecoverySpecification(
                point_in_time_recovery_enabled=True
            ),
            time_to_live_attribute="expires",
            removal_policy=RemovalPolicy.RETAIN,
        )
        self.table.add_global_secondary_index(
            index_name=TENANT_INDEX,
            partition_key=_text("tenant"),
            sort_key=_text("created_id"),
            projection_type=dynamodb.ProjectionType.ALL,
        )


def _text(name: str) -> dynamodb.Attribute:
    return dynamodb.Attribute(name=name, type=dynamodb.AttributeType.STRING)
