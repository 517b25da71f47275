"""The Data stack: what it keeps, for how long, and who hears of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from infra.config import ConfigRefused
from tests.infra.compute.kinds import PRODUCERS, SHORT
from tests.infra.conftest import Synth
from tests.infra.reading import Deployment, Template
from tidemill.batch.batch_request import MAX_EXPIRY_SECONDS, MAX_WINDOW_SECONDS
from tidemill.batch.states import Status
from tidemill.handler.aws.bucket import SHORT_LIVED
from tidemill.handler.aws.events import DETAIL_TYPE, SOURCE
from tidemill.handler.settings import read_settings

if TYPE_CHECKING:
    from aws_cdk import App

DAY_SECONDS = 24 * 3600
ACCOUNT = "111122223333"


@pytest.fixture(scope="module")
def deployment(templates: dict[str, Template]) -> Deployment:
    """Return the deployment of infra/config.toml."""
    return Deployment(templates)


@pytest.fixture(scope="module")
def bucket(deployment: Deployment) -> dict[str, Any]:
    """Return the properties of the bucket."""
    return deployment.properties("AWS::S3::Bucket")["DropsBucket"]


@pytest.fixture(scope="module")
def queues(deployment: Deployment) -> dict[str, dict[str, Any]]:
    """Return the properties of the queues by their plain names."""
    found = deployment.properties("AWS::SQS::Queue")
    return {name.removeprefix("Doorbells"): queue for name, queue in found.items()}


def rules(bucket: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the lifecycle rules that hold, by their ids."""
    found = bucket["LifecycleConfiguration"]["Rules"]
    return {rule["Id"]: rule for rule in found if rule["Status"] == "Enabled"}


# The bucket


def test_the_bucket_is_private(bucket: dict[str, Any]) -> None:
    """No ACL and no policy can make an object public, whatever its writer."""
    assert set(bucket["PublicAccessBlockConfiguration"].values()) == {True}
    assert len(bucket["PublicAccessBlockConfiguration"]) == 4
    (ownership,) = bucket["OwnershipControls"]["Rules"]
    assert ownership == {"ObjectOwnership": "BucketOwnerEnforced"}


def test_the_bucket_is_encrypted_and_versioned(bucket: dict[str, Any]) -> None:
    """S3 encrypts stored objects, and an upload over another leaves the first one readable."""
    (rule,) = bucket["BucketEncryption"]["ServerSideEncryptionConfiguration"]
    assert rule["ServerSideEncryptionByDefault"] == {"SSEAlgorithm": "AES256"}
    assert bucket["VersioningConfiguration"] == {"Status": "Enabled"}


def test_the_bucket_takes_good_tls_only(deployment: Deployment) -> None:
    """A request in the clear, or by a TLS older than 1.2, is refused to everybody."""
    statements = deployment.resource_statements("AWS::S3::BucketPolicy", "DropsBucket")
    assert {json.dumps(statement.pop("Condition")) for statement in statements} == {
        '{"Bool": {"aws:SecureTransport": "false"}}',
        '{"NumericLessThan": {"s3:TlsVersion": 1.2}}',
    }
    for statement in statements:
        assert statement == {
            "Action": "s3:*",
            "Effect": "Deny",
            "Principal": {"AWS": "*"},
            "Resource": ["DropsBucket.Arn", "DropsBucket.Arn/*"],
        }


def test_what_is_lost_for_ever_outlives_its_stack(deployment: Deployment) -> None:
    """Bucket and table stay when the stack goes, or when a change would replace them."""
    for kind in ("AWS::S3::Bucket", "AWS::DynamoDB::Table"):
        ((_, resource),) = deployment.resources(kind).items()
        assert resource["DeletionPolicy"] == "Retain"
        assert resource["UpdateReplacePolicy"] == "Retain"


def test_abandoned_uploads_are_aborted(bucket: dict[str, Any]) -> None:
    """Parts of an abandoned upload, which cost and do not show, go after a week, anywhere."""
    rule = rules(bucket)["abandoned-uploads"]
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}
    assert "Prefix" not in rule


def test_work_in_flight_outlasts_every_batch(bucket: dict[str, Any]) -> None:
    """Work goes when the longest batch must have ended, and with it what was deleted there."""
    rule = rules(bucket)["work"]
    assert rule["Prefix"] == "work/"
    assert rule["ExpirationInDays"] * DAY_SECONDS > MAX_WINDOW_SECONDS + DAY_SECONDS
    assert rule["NoncurrentVersionExpiration"] == {"NoncurrentDays": 1}


def test_a_replaced_input_lasts_as_long_as_a_batch_that_reads_it(bucket: dict[str, Any]) -> None:
    """Inputs are their owners': only versions that a newer upload has replaced go."""
    rule = rules(bucket)["replaced-input"]
    assert rule["Prefix"] == "input/"
    noncurrent = rule["NoncurrentVersionExpiration"]["NoncurrentDays"]
    assert noncurrent * DAY_SECONDS > MAX_WINDOW_SECONDS
    assert "ExpirationInDays" not in rule


@pytest.mark.parametrize("prefix", ["output", "files"])
def test_results_go_when_the_configuration_says(bucket: dict[str, Any], prefix: str) -> None:
    """Results are kept for 90 days, and for a week more where something was written over them."""
    rule = rules(bucket)[f"old-{prefix}"]
    assert rule["Prefix"] == f"{prefix}/"
    assert rule["ExpirationInDays"] == 90
    assert rule["NoncurrentVersionExpiration"]["NoncurrentDays"] >= 7


def test_a_deleted_file_lasts_as_long_as_a_batch_that_reads_it(bucket: dict[str, Any]) -> None:
    """Batches read the version that they pinned, whatever happens to the file since."""
    days = rules(bucket)["old-files"]["NoncurrentVersionExpiration"]["NoncurrentDays"]
    assert days * DAY_SECONDS > MAX_WINDOW_SECONDS + DAY_SECONDS


def test_files_that_clients_let_expire_go(bucket: dict[str, Any]) -> None:
    """Their tag's rule deletes them after the maximum of `expires_after`."""
    rule = rules(bucket)["short-lived-files"]
    (tag,) = rule["TagFilters"]
    assert f"{tag['Key']}={tag['Value']}" == SHORT_LIVED
    assert rule["Prefix"] == "files/"
    assert rule["ExpirationInDays"] * DAY_SECONDS == MAX_EXPIRY_SECONDS


def test_browsers_reach_objects_by_signed_urls(bucket: dict[str, Any]) -> None:
    """Any page may read and upload parts; no other request to the bucket is allowed."""
    (rule,) = bucket["CorsConfiguration"]["CorsRules"]
    assert rule["AllowedOrigins"] == ["*"]
    assert set(rule["AllowedMethods"]) == {"GET", "PUT"}
    assert "ETag" in rule["ExposedHeaders"]


def test_the_api_says_how_long_files_last(deployment: Deployment, bucket: dict[str, Any]) -> None:
    """The lifetime reported to clients is that of the bucket's rule."""
    days = rules(bucket)["old-files"]["ExpirationInDays"]
    for function in deployment.properties("AWS::Lambda::Function").values():
        assert function["Environment"]["Variables"]["TIDEMILL_FILE_DAYS"] == str(days)


def test_retention_is_configured(adjusted: Deployment) -> None:
    """Work, logs and the table last as the file says; 0 days of output is for ever."""
    found = adjusted
    held = rules(found.properties("AWS::S3::Bucket")["DropsBucket"])
    assert held["work"]["ExpirationInDays"] == 20
    assert held["replaced-input"]["NoncurrentVersionExpiration"] == {"NoncurrentDays": 20}
    for prefix in ("output", "files"):
        assert "ExpirationInDays" not in held[f"old-{prefix}"]
    assert held["old-files"]["NoncurrentVersionExpiration"] == {"NoncurrentDays": 20}
    assert "ExpirationInDays" not in held["old-media"]
    logs = found.properties("AWS::Logs::LogGroup")
    assert {group["RetentionInDays"] for group in logs.values()} == {7}
    functions = found.properties("AWS::Lambda::Function").values()
    assert {
        function["Environment"]["Variables"]["TIDEMILL_KEEP_DAYS"] for function in functions
    } == {"30"}


def test_inputs_go_where_the_configuration_says(synth: Synth) -> None:
    """The rule is for drops; the version that a batch reads stays while it may run."""
    found = Deployment(synth(SHORT))
    rule = rules(found.properties("AWS::S3::Bucket")["DropsBucket"])["replaced-input"]
    assert (rule["Prefix"], rule["ExpirationInDays"]) == ("input/", 3)
    noncurrent = rule["NoncurrentVersionExpiration"]["NoncurrentDays"]
    assert noncurrent * DAY_SECONDS > MAX_WINDOW_SECONDS


def test_an_uploaded_input_lasts_as_long_as_a_batch_that_reads_it(synth: Synth) -> None:
    """Files of the API outlive any batch, however short results are kept."""
    found = Deployment(synth(SHORT))
    held = rules(found.properties("AWS::S3::Bucket")["DropsBucket"])
    assert held["old-output"]["ExpirationInDays"] == 2
    assert held["old-files"]["ExpirationInDays"] == held["work"]["ExpirationInDays"]


def test_media_go_with_the_dropped_files_that_name_them(synth: Synth) -> None:
    """No media that are uploaded with a batch expire while it may still read them."""
    held = rules(Deployment(synth(SHORT)).properties("AWS::S3::Bucket")["DropsBucket"])
    rule = held["old-media"]
    assert rule["Prefix"] == "media/"
    assert rule["ExpirationInDays"] == held["work"]["ExpirationInDays"]
    inputs = held["replaced-input"]
    assert rule["NoncurrentVersionExpiration"] == inputs["NoncurrentVersionExpiration"]


def test_uploads_are_announced(bucket: dict[str, Any]) -> None:
    """S3 reports everything new under `input/`, whatever its name, and nothing else.

    The events have a separate queue: they have no group, and would come before all that have one.
    """
    assert bucket["NotificationConfiguration"] == {
        "QueueConfigurations": [
            {
                "Event": "s3:ObjectCreated:*",
                "Queue": "DoorbellsDrops.Arn",
                "Filter": {"S3Key": {"Rules": [{"Name": "prefix", "Value": "input/"}]}},
            }
        ]
    }


def test_the_queue_admits_the_bucket_before_the_notification_is_set(deployment: Deployment) -> None:
    """S3 tries the queue when notifications are set up, so its policy must be there by then."""
    template = deployment.templates["Data"]["Resources"]
    bucket = deployment.resources("AWS::S3::Bucket")["DropsBucket"]
    assert [template[name]["Type"] for name in bucket["DependsOn"]] == ["AWS::SQS::QueuePolicy"]
    (policy,) = (template[name] for name in bucket["DependsOn"])
    assert deployment.plain(policy["Properties"]["Queues"]) == ["DoorbellsDrops"]
    assert [
        statement["Condition"]
        for statement in deployment.resource_statements("AWS::SQS::QueuePolicy", "DoorbellsDrops")
        if statement["Principal"] == {"Service": "s3.amazonaws.com"}
    ] == [{"StringEquals": {"aws:SourceAccount": ACCOUNT}}]


def test_the_queue_of_older_versions_shuts_after_the_bucket_has_left_it(
    deployment: Deployment,
) -> None:
    """Its policy changes once uploads go elsewhere, so that an update refuses none in between."""
    template = deployment.templates["Data"]["Resources"]
    policy = deployment.resources("AWS::SQS::QueuePolicy")["DoorbellsControlPolicy"]
    assert "AWS::S3::Bucket" in {template[name]["Type"] for name in policy["DependsOn"]}


def test_producers_put_files_and_do_nothing_else(adjusted: Deployment) -> None:
    """Each into all of `input/`, or into its tenant's folder alone; the Lambdas know of folders."""
    found = adjusted
    partner, search, second = (producer["arn"] for producer in PRODUCERS)
    allowed = [
        statement
        for statement in found.resource_statements("AWS::S3::BucketPolicy", "DropsBucket")
        if statement["Effect"] == "Allow"
    ]
    assert allowed == [
        {
            "Action": "s3:PutObject",
            "Effect": "Allow",
            "Principal": {"AWS": arns},
            "Resource": f"DropsBucket.Arn/input/{folder}*",
        }
        for arns, folder in ((partner, ""), ([search, second], "search/"))
    ]
    for function in found.properties("AWS::Lambda::Function").values():
        assert read_settings(function["Environment"]["Variables"]).drop_tenants


def test_more_producers_than_a_policy_holds_are_refused(
    make_app: Callable[..., App],
) -> None:
    """A hundred of one tenant fit; a sentence says that a hundred with long names do not."""
    arns = [f"arn:aws:iam::444455556666:role/producer-{number}" for number in range(100)]
    make_app({"producers": [{"arn": arn} for arn in arns]})
    long = [{"arn": f"{arn}/{'x' * 200}"} for arn in arns]
    with pytest.raises(
        ConfigRefused, match=r"policy needs about 2\d,\d{3} bytes, and AWS allows 20,4"
    ):
        make_app({"producers": long})


# The table


def test_the_table_forgets_and_can_be_restored(deployment: Deployment) -> None:
    """Items go at `expires`; any second of the last 35 days can be brought back."""
    table = deployment.properties("AWS::DynamoDB::Table")["BatchesTable"]
    assert table["TimeToLiveSpecification"] == {"AttributeName": "expires", "Enabled": True}
    assert table["PointInTimeRecoverySpecification"] == {"PointInTimeRecoveryEnabled": True}
    assert table["SSESpecification"] == {"SSEEnabled": True}
    assert table["BillingMode"] == "PAY_PER_REQUEST"


def test_the_table_has_its_keys_and_its_index(deployment: Deployment) -> None:
    """Items by `pk` and `sk`, batches by tenant in the order of their making."""
    table = deployment.properties("AWS::DynamoDB::Table")["BatchesTable"]
    assert keys_of(table) == {"HASH": "pk", "RANGE": "sk"}
    (index,) = table["GlobalSecondaryIndexes"]
    assert index["IndexName"] == "by_tenant"
    assert keys_of(index) == {"HASH": "tenant", "RANGE": "created_id"}
    assert index["Projection"] == {"ProjectionType": "ALL"}
    assert {found["AttributeType"] for found in table["AttributeDefinitions"]} == {"S"}


def keys_of(table: dict[str, Any]) -> dict[str, str]:
    """Return the names of the keys of a table or an index."""
    return {key["KeyType"]: key["AttributeName"] for key in table["KeySchema"]}


# The queues


def test_queues_are_encrypted_and_take_tls_only(
    deployment: Deployment, queues: dict[str, dict[str, Any]]
) -> None:
    """No message is stored or sent in the clear."""
    assert len(queues) == 6
    for name, queue in queues.items():
        assert queue["SqsManagedSseEnabled"] is True, name
        statements = deployment.resource_statements("AWS::SQS::QueuePolicy", f"Doorbells{name}")
        assert {
            "Action": "sqs:*",
            "Effect": "Deny",
            "Principal": {"AWS": "*"},
            "Resource": f"Doorbells{name}.Arn",
            "Condition": {"Bool": {"aws:SecureTransport": "false"}},
        } in statements


def test_dead_letters_have_a_place(queues: dict[str, dict[str, Any]]) -> None:
    """Messages that cannot be handled go to one queue, and its failures to a person."""
    redrive = {name: queue.get("RedrivePolicy") for name, queue in queues.items()}
    assert redrive == {
        "Control": {"deadLetterTargetArn": "DoorbellsDeadLetters.Arn", "maxReceiveCount": 15},
        "Intake": {"deadLetterTargetArn": "DoorbellsDeadLetters.Arn", "maxReceiveCount": 15},
        "Drops": {"deadLetterTargetArn": "DoorbellsDeadLetters.Arn", "maxReceiveCount": 15},
        "Worktidemilldemo": {
            "deadLetterTargetArn": "DoorbellsDeadLetters.Arn",
            "maxReceiveCount": 5,
        },
        "DeadLetters": {
            "deadLetterTargetArn": "DoorbellsUndeliverable.Arn",
            "maxReceiveCount": 240,
        },
        "Undeliverable": None,
    }


def test_messages_wait_as_long_as_any_batch_may_run(queues: dict[str, dict[str, Any]]) -> None:
    """A shard of a batch with the longest window can wait its turn to the end."""
    for queue in queues.values():
        assert queue["MessageRetentionPeriod"] >= MAX_WINDOW_SECONDS


def test_ends_of_workers_of_this_account_may_speak_to_control(deployment: Deployment) -> None:
    """Besides our own roles, EventBridge may send for this deployment's rules."""
    statements = deployment.resource_statements("AWS::SQS::QueuePolicy", "DoorbellsControl")
    rules = f"arn:aws:events:eu-west-1:{ACCOUNT}:rule/tidemill-*"
    assert [statement for statement in statements if statement["Effect"] == "Allow"] == [
        {
            "Action": "sqs:SendMessage",
            "Effect": "Allow",
            "Principal": {"Service": "events.amazonaws.com"},
            "Resource": "DoorbellsControl.Arn",
            "Condition": {
                "StringEquals": {"aws:SourceAccount": ACCOUNT},
                "ArnLike": {"aws:SourceArn": rules},
            },
        },
    ]


@pytest.mark.parametrize("name", ["Worktidemilldemo", "Intake", "DeadLetters"])
def test_only_our_roles_may_send_to_workers(deployment: Deployment, name: str) -> None:
    """No policy allows others to send to these queues: only roles of ours can."""
    statements = deployment.resource_statements("AWS::SQS::QueuePolicy", f"Doorbells{name}")
    assert {statement["Effect"] for statement in statements} == {"Deny"}


def test_each_model_has_a_separate_queue(adjusted: Deployment) -> None:
    """Processes find each model's queue by the model's name."""
    urls = json.loads(adjusted.outputs("Data")["WorkQueueUrls"])
    assert urls == {
        "org/Big": "DoorbellsWorkorgbig",
        "Qwen/Qwen3-0.6B": "DoorbellsWorkqwenqwen306b",
        "small": "DoorbellsWorksmall",
    }
    assert set(urls.values()) < set(adjusted.resources("AWS::SQS::Queue"))


# Events and alarms


def test_a_batch_that_ends_badly_is_reported(deployment: Deployment) -> None:
    """The bus sends batches that failed or expired to the topic, as text."""
    rule = deployment.properties("AWS::Events::Rule")["EventsEndedBadly"]
    assert rule["EventBusName"] == "EventsBus"
    assert rule["State"] == "ENABLED"
    assert rule["EventPattern"] == {
        "source": [SOURCE],
        "detail-type": [DETAIL_TYPE],
        "detail": {"status": [str(Status.FAILED), str(Status.EXPIRED)]},
    }
    (target,) = rule["Targets"]
    assert target["Arn"] == "EventsAlarms"
    assert target["DeadLetterConfig"] == {"Arn": "DoorbellsUndeliverable.Arn"}
    assert target["InputTransformer"] == {
        "InputPathsMap": {
            "detail-batch_id": "$.detail.batch_id",
            "detail-input": "$.detail.input",
            "detail-status": "$.detail.status",
        },
        "InputTemplate": '"Batch <detail-batch_id> of <detail-input> is <detail-status>."',
    }


def test_a_batch_that_ends_badly_is_reported_to_a_chat(adjusted: Deployment) -> None:
    """Amazon Q Developer shows messages of this format, and alarms unchanged."""
    (target,) = adjusted.properties("AWS::Events::Rule")["EventsEndedBadly"]["Targets"]
    message = json.loads(target["InputTransformer"]["InputTemplate"])
    assert (message["version"], message["source"]) == ("1.0", "custom")
    assert message["content"] == {
        "textType": "client-markdown",
        "title": "Batch <detail-status>",
        "description": "Batch <detail-batch_id> of <detail-input> is <detail-status>.",
    }


def test_the_bus_has_the_deployments_name(deployment: Deployment, adjusted: Deployment) -> None:
    """Two deployments of an account have separate buses."""
    for name, found in (("tidemill", deployment), ("mill-two", adjusted)):
        assert found.properties("AWS::Events::EventBus")["EventsBus"]["Name"] == name


def test_the_topic_hears_rules_and_alarms_by_tls(deployment: Deployment) -> None:
    """EventBridge and CloudWatch may publish, the latter for this account; only by TLS."""
    statements = deployment.resource_statements("AWS::SNS::TopicPolicy", "EventsAlarms")
    principals = {
        (statement["Effect"], json.dumps(statement["Principal"]), json.dumps(condition))
        for statement in statements
        for condition in [statement.get("Condition")]
    }
    assert principals == {
        ("Deny", '"*"', '{"Bool": {"aws:SecureTransport": "false"}}'),
        ("Allow", '{"Service": "events.amazonaws.com"}', "null"),
        (
            "Allow",
            '{"Service": "cloudwatch.amazonaws.com"}',
            f'{{"StringEquals": {{"aws:SourceAccount": "{ACCOUNT}"}}}}',
        ),
    }
    assert {statement["Action"] for statement in statements} == {"sns:Publish"}


def test_the_alarm_address_is_subscribed(deployment: Deployment, adjusted: Deployment) -> None:
    """The configured address gets the topic's mails; without one there is no subscription."""
    assert deployment.properties("AWS::SNS::Subscription") == {}
    (subscription,) = adjusted.properties("AWS::SNS::Subscription").values()
    assert subscription == {
        "Protocol": "email",
        "Endpoint": "ops@example.com",
        "TopicArn": "EventsAlarms",
    }


def test_every_alarm_is_sent_and_explained(deployment: Deployment) -> None:
    """Each alarm for people goes to the topic and explains its meaning and where to read on."""
    alarms = deployment.properties("AWS::CloudWatch::Alarm")
    for_people = {
        name: alarm for name, alarm in alarms.items() if alarm["AlarmActions"] == ["EventsAlarms"]
    }
    assert {"UndeliverableAlarm", "DeadLetterAlarm", "ControlAgeAlarm"} < set(for_people)
    for name, alarm in for_people.items():
        assert alarm["AlarmDescription"].endswith(". See docs/guides/operate.md."), name
        assert alarm["TreatMissingData"] == "notBreaching", name
    # All others are what scaling listens to.
    for name in set(alarms) - set(for_people):
        assert "Scaling" in name


@pytest.mark.parametrize(
    ("name", "queue", "metric", "above", "minutes"),
    [
        ("UndeliverableAlarm", "Undeliverable", "ApproximateNumberOfMessagesVisible", 0, 1),
        ("DeadLetterAlarm", "DeadLetters", "ApproximateAgeOfOldestMessage", 600, 1),
        ("ControlAgeAlarm", "Control", "ApproximateAgeOfOldestMessage", 1800, 5),
    ],
)
def test_queues_raise_alarms(  # noqa: PLR0917 - a table of alarms
    deployment: Deployment, name: str, queue: str, metric: str, above: int, minutes: int
) -> None:
    """Messages that wait where none should, or for too long, raise one."""
    alarm = deployment.properties("AWS::CloudWatch::Alarm")[name]
    assert alarm["Dimensions"] == [{"Name": "QueueName", "Value": f"Doorbells{queue}.QueueName"}]
    assert (alarm["Namespace"], alarm["MetricName"]) == ("AWS/SQS", metric)
    assert alarm["ComparisonOperator"] == "GreaterThanThreshold"
    assert (alarm["Threshold"], alarm["Period"], alarm["Statistic"]) == (above, 60, "Maximum")
    assert alarm["EvaluationPeriods"] == minutes


def test_the_stack_says_its_names(deployment: Deployment) -> None:
    """The outputs contain what people and scripts need to know."""
    assert deployment.outputs("Data") == {
        "AlarmTopicArn": "EventsAlarms",
        "BucketName": "DropsBucket",
        "TableName": "BatchesTable",
        "ControlQueueUrl": "DoorbellsControl",
        "IntakeQueueUrl": "DoorbellsIntake",
        "DropsQueueUrl": "DoorbellsDrops",
        "FleetsPath": "/tidemill/tidemill/fleets",
        "WorkQueueUrls": '{"tidemill-demo":"DoorbellsWorktidemilldemo"}',
        "DeadLetterQueueUrl": "DoorbellsDeadLetters",
        "UndeliverableQueueUrl": "DoorbellsUndeliverable",
        "EventBusName": "EventsBus",
    }
