"""The bucket: files come in under `input/`, results go out under `output/`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3 as s3
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from infra.config import ConfigRefused, Producer, Retention, Reuse
from tidemill.batch.object_keys import MEDIA_PREFIX

# Any name: an object that cannot be processed becomes a batch with the reason.
_DROPS = "input/"
# Older versions are needed while a batch that reads one may still run.
_ABANDONED_UPLOAD_DAYS = 7
# Maximum of `expires_after`.
_SHORT_LIVED_DAYS = 30
SHORT_LIVED_TAG = "tidemill-short-lived"
_MAX_POLICY_BYTES: Final = 20 * 1024
# The longest value that CloudFormation substitutes for a reference to a bucket.
_BUCKET_ARN: Final = "arn:aws-us-gov:s3:::" + "-" * 63


class DropBucket(Construct):
    """A private, versioned bucket that notifies `drops` of uploads; retained by deletions."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        retention: Retention,
        reuse: Reuse | None,
        drops: sqs.Queue,
        key: kms.IKey | None,
    ) -> None:
        super().__init__(scope, construct_id)
        self.bucket = s3.Bucket(
            self,
            "Bucket",
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            encryption=s3.BucketEncryption.KMS if key else s3.BucketEncryption.S3_MANAGED,
            encryption_key=key,
            # One KMS request serves many objects.
            bucket_key_enabled=True if key else None,
            enforce_ssl=True,
            minimum_tls_version=1.2,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            versioned=True,
            removal_policy=RemovalPolicy.RETAIN,
            lifecycle_rules=_lifecycle(retention, reuse),
            # Browsers upload parts and fetch results, from any page: only the presigned URL
            # determines what they may do.
            cors=[
                s3.CorsRule(
                    allowed_methods=[s3.HttpMethods.GET, s3.HttpMethods.PUT],
                    allowed_origins=["*"],
                    allowed_headers=["*"],
                    exposed_headers=["ETag", "Content-Disposition"],
                    max_age=3600,
                )
            ],
        )
        self._notify(drops)

    def _notify(self, drops: sqs.Queue) -> None:
        """Have S3 announce uploads to the queue.

        This is set on the bucket itself: the construct's own way adds a Lambda that may change
        every bucket. The queue's policy must exist before, and so cannot name the bucket.
        """
        allowed = drops.add_to_resource_policy(
            iam.PolicyStatement(
                principals=[iam.ServicePrincipal("s3.amazonaws.com")],
                actions=["sqs:SendMessage"],
                resources=[drops.queue_arn],
                conditions={"StringEquals": {"aws:SourceAccount": self.bucket.stack.account}},
            )
        )
        resource = self.bucket.node.default_child
        assert isinstance(resource, s3.CfnBucket)
        resource.notification_configuration = s3.CfnBucket.NotificationConfigurationProperty(
            queue_configurations=[
                s3.CfnBucket.QueueConfigurationProperty(
                    event="s3:ObjectCreated:*",
                    queue=drops.queue_arn,
                    filter=s3.CfnBucket.NotificationFilterProperty(
                        s3_key=s3.CfnBucket.S3KeyFilterProperty(
                            rules=[s3.CfnBucket.FilterRuleProperty(name="prefix", value=_DROPS)]
                        )
                    ),
                )
            ]
        )
        assert allowed.policy_dependable is not None
        resource.node.add_dependency(allowed.policy_dependable)

    def let_in(self, producers: Sequence[Producer]) -> None:
        """Allow principals to put objects under `input/`, or only under their tenant's folder.

        Raises ConfigRefused if the bucket policy's size limit is exceeded.
        """
        for tenant in dict.fromkeys(producer.tenant for producer in producers):
            folder = f"{tenant}/" if tenant else ""
            arns = dict.fromkeys(each.arn for each in producers if each.tenant == tenant)
            self.bucket.add_to_resource_policy(
                iam.PolicyStatement(
                    principals=[iam.ArnPrincipal(arn) for arn in arns],
                    actions=["s3:PutObject"],
                    resources=[self.bucket.arn_for_objects(f"{_DROPS}{folder}*")],
                )
            )
        assert self.bucket.policy is not None
        policy = self.bucket.stack.resolve(self.bucket.policy.document)
        num_bytes = len(json.dumps(_deployed(policy), separators=(",", ":")))
        if num_bytes > _MAX_POLICY_BYTES:
            raise ConfigRefused(
                f"producers are too many: the bucket policy needs about {num_bytes:,} bytes, and "
                f"AWS allows {_MAX_POLICY_BYTES:,}. Name fewer tenants or principals; the root of "
                "an account includes all principals that its own policies allow."
            )


def _deployed(policy: Any) -> Any:
    """Return a resolved policy with placeholders as long as the deployed values."""
    match policy:
        case {"Fn::GetAtt": _}:
            return _BUCKET_ARN
        case {"Fn::Join": [separator, parts]}:
            return separator.join(_deployed(part) for part in parts)
        case dict():
            return {key: _deployed(value) for key, value in policy.items()}
        case list():
            return [_deployed(value) for value in policy]
    return policy


def _lifecycle(retention: Retention, reuse: Reuse | None) -> list[s3.LifecycleRule]:
    work = Duration.days(retention.work_days)
    rules = [
        s3.LifecycleRule(
            id="abandoned-uploads",
            abort_incomplete_multipart_upload_after=Duration.days(_ABANDONED_UPLOAD_DAYS),
            expired_object_delete_marker=True,
        ),
        # The current version of work in flight is deleted with its batch at the latest; each object
        # has only one version, so an older version is a deleted object.
        s3.LifecycleRule(
            id="work",
            prefix="work/",
            expiration=work,
            noncurrent_version_expiration=Duration.days(1),
        ),
        # A batch reads the version that was dropped, also after a newer drop of the same key, or
        # after the object's expiry.
        s3.LifecycleRule(
            id="replaced-input",
            prefix=_DROPS,
            expiration=_days(retention.input_days),
            noncurrent_version_expiration=work,
        ),
    ]
    # Without reuse, results stored by an earlier release or configuration are deleted at once.
    rules.append(
        s3.LifecycleRule(
            id="kept-results",
            prefix="results/",
            expiration=Duration.days(reuse.days if reuse else 1),
            noncurrent_version_expiration=Duration.days(1),
        )
    )
    rules.append(
        s3.LifecycleRule(
            id="old-output",
            prefix="output/",
            expiration=_days(retention.output_days),
            noncurrent_version_expiration=Duration.days(_ABANDONED_UPLOAD_DAYS),
        )
    )
    rules.append(
        s3.LifecycleRule(
            id="old-files",
            prefix="files/",
            expiration=_days(retention.file_days),
            # A batch continues to read a file that has been deleted or has expired.
            noncurrent_version_expiration=work,
        )
    )
    rules.append(
        s3.LifecycleRule(
            id="old-media",
            prefix=MEDIA_PREFIX,
            expiration=_days(retention.media_days),
            noncurrent_version_expiration=work,
        )
    )
    # Files for which clients have set an expiry: after this no client can read them.
    rules.append(
        s3.LifecycleRule(
            id="short-lived-files",
            prefix="files/",
            tag_filters={SHORT_LIVED_TAG: "yes"},
            expiration=Duration.days(_SHORT_LIVED_DAYS),
        )
    )
    return rules


def _days(number: int) -> Duration | None:
    return Duration.days(number) if number else None
