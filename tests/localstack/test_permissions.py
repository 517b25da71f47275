"""The real stacks with every request checked against IAM: each role can do its work, and no more.

The emulator serves TLS here, because the stacks' policies refuse everything else.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import trustme
from botocore.exceptions import ClientError
from openai import OpenAI

from infra.config import DEFAULT_PATH, Config, read_config
from infra.ops.client import Api
from infra.ops.drops import Drops
from infra.ops.outputs import Outputs
from localstack.fleet import LocalFleet
from localstack.local import create_key
from localstack.ministack import IamEnforcement, environment_for, running_ministack
from localstack.processes import Processes
from localstack.stacks import client_options, deploy, local_api_url
from tests.emulators import count_messages
from tidemill.batch.fleet import FleetPlan
from tidemill.handler.aws.sync import Aws
from tidemill.handler.deployment import Deployment
from tidemill.handler.settings import read_settings

ROOT = Path(__file__).parents[2]
MODEL = "tidemill-demo"
EXAMPLE = (ROOT / "examples" / "demo.jsonl").read_bytes()
CONFIG = (
    DEFAULT_PATH.read_text(encoding="utf-8")
    .replace("drop_tenants = false", "drop_tenants = true")
    .replace("[retention]", "[retention]\nerase_batches = true")
)
# The emulator checks permissions that IAM does not have: there a batch of messages is sent by the
# right to send one, and parameters are read by the right to those of their path.
# https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonsqs.html
# https://docs.aws.amazon.com/service-authorization/latest/reference/list_awssystemsmanager.html
EMULATOR_ONLY = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Action": ["sqs:SendMessageBatch", "ssm:GetParametersByPath"],
            "Resource": "*",
        }
    ],
}


@dataclass(frozen=True, slots=True)
class Guarded:
    """A deployment whose every request is checked; `environment` leads administrators to it."""

    environment: Mapping[str, str]
    outputs: Outputs
    drops: Drops
    worker: Mapping[str, str]
    api_url: str
    folder: Path

    def client(self, service: str, environment: Mapping[str, str] | None = None) -> Any:
        """Return a client with an administrator's rights, or those that an environment holds."""
        environment = environment or self.environment
        session = {"aws_session_token": environment.get("AWS_SESSION_TOKEN")}
        return boto3.client(service, **client_options(environment), **session)


REVIEWS = pa.table({"id": [1, 2], "review": ["Great food.", "Never again."]})
RECIPE = b"prompt = 'Sentiment of: {{ review }}'\nid = 'id'\nparams = {max_tokens = 4}\n"
# Keys that add to what roles are allowed, or bound it.
MORE_KEYS = """\
tracing = true
role_path = "/platform/"
permissions_boundary = "{boundary}"
kms_key = "{key}"
tags = {{ team = "search" }}
producers = [{{ arn = "arn:aws:iam::000000000000:role/etl", tenant = "search" }}]
"""


def write_config(options: Mapping[str, Any], folder: Path) -> Path:
    """Write the configuration with more keys, and make the policy and the key that they name."""
    everything = {"Effect": "Allow", "Action": "*", "Resource": "*"}
    document = json.dumps({"Version": "2012-10-17", "Statement": [everything]})
    iam, kms = boto3.client("iam", **options), boto3.client("kms", **options)
    boundary = iam.create_policy(PolicyName="boundary", PolicyDocument=document)["Policy"]["Arn"]
    key = kms.create_key()["KeyMetadata"]["Arn"]
    more, text = MORE_KEYS.format(boundary=boundary, key=key), CONFIG
    for name in (line.split(" = ")[0] for line in more.splitlines()):
        text = re.sub(rf"^{name} = .*\n", "", text, flags=re.MULTILINE)
    path = folder / "config.toml"
    path.write_text(more + text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Deploy Data and Api, and give the worker the role that the Compute stack makes for it."""
    folder = tmp_path_factory.mktemp("guarded")
    enforcement = make_enforcement(folder)
    with running_ministack(folder, enforcement=enforcement) as url:
        environment = environment_for(url, enforcement.authority)
        options = client_options(environment)
        path = write_config(options, folder)
        config = read_config(path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("localstack.stacks.synthesise", synthesise)
            outputs = deploy(environment, folder, config=path, name=config.name)
        iam = boto3.client("iam", **options)
        for role in iam.list_roles(MaxItems=1000)["Roles"]:
            if role["RoleName"].startswith(f"{config.name}-api-"):
                put_policy(iam, role["RoleName"], EMULATOR_ONLY)
        policy = resolve(worker_policy(config, folder), boto3.client("cloudformation", **options))
        yield Guarded(
            environment,
            outputs,
            Drops(boto3.client("s3", **options), outputs.bucket),
            environment | assume_role(options, policy),
            local_api_url(url, outputs),
            folder,
        )


def make_enforcement(folder: Path) -> IamEnforcement:
    """Return what the emulator proves itself by."""
    found = IamEnforcement(folder / "server.pem", folder / "key.pem", folder / "authority.pem")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    authority.cert_pem.write_to_path(found.authority)
    certificate.private_key_pem.write_to_path(found.key)
    certificate.cert_chain_pems[0].write_to_path(found.certificate)
    return found


def synthesise(folder: Path, *, config: Path, **_: str) -> Path:
    """Write the templates for Lambdas on this machine, without two more processes."""
    from aws_cdk import App

    from infra.app import add_stacks
    from infra.bundle import host_processor, make_bundle
    from infra.pip_target import python_version

    context = json.loads((ROOT / "cdk.json").read_text(encoding="utf-8"))["context"]
    app = App(outdir=str(folder / "cdk"), context=context)
    bundle = make_bundle(host_processor(), python=python_version())
    add_stacks(app, read_config(config), bundle)
    app.synth()
    return folder / "cdk"


def worker_policy(config: Config, folder: Path) -> dict[str, Any]:
    """Return the policy of the worker's task role, as the Compute stack has it."""
    from aws_cdk import App
    from aws_cdk import aws_lambda as lambda_
    from aws_cdk.assertions import Template

    from infra.app import add_stacks
    from infra.bundle import Bundle
    from infra.image import DOCKERFILE

    dockerfile = folder / "image" / DOCKERFILE
    dockerfile.parent.mkdir(parents=True)
    dockerfile.write_text("FROM scratch\n", encoding="utf-8")
    app = App()
    code = lambda_.Code.from_asset(str(ROOT / "examples"))
    bundle = Bundle(code, code, lambda_.Runtime.PYTHON_3_13, lambda_.Architecture.ARM_64)
    add_stacks(app, config, bundle, folder / "image")
    compute = app.node.find_child("Compute")
    resources = Template.from_stack(compute).to_json()["Resources"]
    [role] = {
        resource["Properties"]["TaskRoleArn"]["Fn::GetAtt"][0]
        for resource in resources.values()
        if resource["Type"] == "AWS::ECS::TaskDefinition"
    }
    [policy] = [
        resource["Properties"]["PolicyDocument"]
        for resource in resources.values()
        if resource["Type"] == "AWS::IAM::Policy"
        and {"Ref": role} in resource["Properties"]["Roles"]
    ]
    return dict(policy)


def resolve(template: Any, cloudformation: Any) -> Any:
    """Return a piece of a template with its references resolved as CloudFormation does it."""
    exports = {
        export["Name"]: export["Value"]
        for page in cloudformation.get_paginator("list_exports").paginate()
        for export in page["Exports"]
    }
    pseudo = {
        "AWS::Partition": "aws",
        "AWS::Region": "us-east-1",
        "AWS::AccountId": "000000000000",
        "AWS::URLSuffix": "amazonaws.com",
    }

    def value(found: Any) -> Any:
        match found:
            case {"Fn::ImportValue": name}:
                return exports[name]
            case {"Fn::Join": [between, parts]}:
                return between.join(value(part) for part in parts)
            case {"Ref": name}:
                return pseudo[name]
            case dict():
                return {name: value(item) for name, item in found.items()}
            case list():
                return [value(item) for item in found]
        return found

    return value(template)


def assume_role(options: Mapping[str, Any], policy: dict[str, Any]) -> dict[str, str]:
    """Make a role with the policy and return the variables of its temporary credentials."""
    trust = {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Principal": {"AWS": "arn:aws:iam::000000000000:root"},
                "Action": "sts:AssumeRole",
            }
        ],
    }
    iam = boto3.client("iam", **options)
    role = iam.create_role(RoleName="worker", AssumeRolePolicyDocument=json.dumps(trust))["Role"]
    put_policy(iam, "worker", policy)
    found = boto3.client("sts", **options).assume_role(
        RoleArn=role["Arn"], RoleSessionName="worker"
    )["Credentials"]
    return {
        "AWS_ACCESS_KEY_ID": found["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": found["SecretAccessKey"],
        "AWS_SESSION_TOKEN": found["SessionToken"],
    }


def put_policy(iam: Any, role: str, policy: dict[str, Any]) -> None:
    """Give a role a further policy."""
    iam.put_role_policy(RoleName=role, PolicyName="test", PolicyDocument=json.dumps(policy))


def test_a_file_becomes_rows_with_every_request_checked(guarded: Guarded) -> None:
    """Intake, launcher, worker, finalize and who counts ends have all the rights they need."""
    settings = guarded.outputs.environment | {"TIDEMILL_WAIT_SECONDS": "1"}
    aws = Aws(lambda service, **_: guarded.client(service))
    deployment = Deployment(read_settings(guarded.outputs.environment))
    with Processes({**guarded.worker, **settings}, guarded.folder) as processes:
        fleet = LocalFleet(processes, aws, deployment, lambda _: None)
        fleet.release(
            FleetPlan(MODEL, "processes", "r:1"), sys.executable, "-m", "tidemill", "worker"
        )
        with fleet.reconciling():
            guarded.drops.drop("example", EXAMPLE)
            guarded.drops.put("example.jsonl.gz", gzip.compress(EXAMPLE))
            guarded.drops.put("reviews.recipe.toml", RECIPE)
            guarded.drops.put("reviews.parquet", to_parquet(REVIEWS))
            report = guarded.drops.wait("example", seconds=120)
            packed = guarded.drops.wait("example.jsonl.gz", seconds=120)
            table = guarded.drops.wait("reviews.parquet", seconds=120)
            [(name, worker)] = processes.processes.items()
            worker.kill()
            deadline = time.monotonic() + 600
            while not aws.run(deployment.fleets.get_state(MODEL)).ends:
                assert time.monotonic() < deadline, "the end of a worker is not counted"
                time.sleep(0.1)
        log = processes.read_log(name)
    assert report["status"] == "completed"
    assert report["request_counts"]["total"] == len(EXAMPLE.splitlines())
    assert len(guarded.drops.rows("example")) == report["request_counts"]["completed"]
    assert packed["request_counts"] == report["request_counts"]
    assert table["tidemill"]["table_url"].endswith("/output/reviews.parquet"), table
    made = pq.read_table(io.BytesIO(guarded.drops.read("output/reviews.parquet") or b""))
    assert made.select(REVIEWS.schema.names).equals(REVIEWS)
    assert all(made["text"].to_pylist())
    assert "AccessDenied" not in log


def to_parquet(table: pa.Table) -> bytes:
    """Return the bytes of a Parquet file."""
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def test_the_api_answers_and_cancels_under_its_roles(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API finds the key, then the batch, and ends it with a report; then all of it is erased.

    A tenant's drops are those in its folder.
    """
    monkeypatch.setenv("SSL_CERT_FILE", guarded.environment["SSL_CERT_FILE"])
    options = client_options(guarded.environment)
    key = create_key(options, guarded.outputs, name="test", tenant="search")
    url = guarded.drops.drop("search/cancelled", EXAMPLE)
    with closing(Api(guarded.api_url, key)) as api:
        batch = api.follow(url, seconds=60, until=lambda batch: batch["status"] == "in_progress")
        assert api.cancel(batch["id"])["status"] == "cancelled"
    report = guarded.drops.wait("search/cancelled", seconds=30)
    assert (report["id"], report["status"]) == (batch["id"], "cancelled")
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=guarded.api_url, headers=headers) as http:
        path = f"/v1/batches/{batch['id']}"
        assert http.delete(path).json()["tidemill"]["erasing_at"]
        # Runs that began before may write its report once more.
        sqs, found = guarded.client("sqs"), guarded.outputs
        urls = (found.control_queue, found.intake_queue, found.drops_queue)
        wait_for(lambda: not any(count_messages(sqs, url) for url in urls))
        # As if it had ended long ago, so that no run can write for it any more.
        guarded.client("dynamodb").update_item(
            TableName=guarded.outputs.table,
            Key={"pk": {"S": f"BATCH#{batch['id']}"}, "sk": {"S": "META"}},
            UpdateExpression="SET ended_at = :long_ago, turn_until = :long_ago",
            ExpressionAttributeValues={":long_ago": {"N": "1"}},
        )
        http.delete(path)
        wait_for(lambda: http.get(path).json()["tidemill"]["erased_at"] is not None)
    listed = [
        guarded.client("s3").list_object_versions(Bucket=guarded.outputs.bucket, Prefix=prefix)
        for prefix in ("input/search/", "output/search/", f"work/{batch['id']}/")
    ]
    assert [versions.get("Versions", []) for versions in listed] == [[], [], []]


def test_the_api_keeps_files_under_its_role(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and uploads of both kinds work, from the first byte to the last, with OpenAI's SDK."""
    monkeypatch.setenv("SSL_CERT_FILE", guarded.environment["SSL_CERT_FILE"])
    key = create_key(client_options(guarded.environment), guarded.outputs, name="files")
    expires: Any = {"anchor": "created_at", "seconds": 3600}
    data = bytes(range(256)) * 40_000  # above S3's smallest part
    with OpenAI(base_url=f"{guarded.api_url}/v1", api_key=key) as client:
        small = client.files.create(file=b"\xff\x00", purpose="batch", expires_after=expires)
        assert client.files.content(small.id).read() == b"\xff\x00"
        chunked = client.uploads.upload_file_chunked(
            file=data,
            filename="x",
            bytes=len(data),
            mime_type="text/plain",
            purpose="batch",
            part_size=4_000_000,
        )
        assert chunked.file is not None
        assert client.files.content(chunked.file.id).read() == data
        begun = [
            client.uploads.create(
                bytes=len(data), filename="y", mime_type="text/plain", purpose="batch"
            ).id
            for _ in range(2)
        ]
        request = {"part_numbers": [1, 2]}
        for upload_id in begun:
            urls = client.post(f"/uploads/{upload_id}/urls", body=request, cast_to=httpx.Response)
            size = urls.json()["part_bytes"]
            for number, part in enumerate(urls.json()["data"]):
                sent = httpx.put(part["url"], content=data[number * size :][:size])
                assert sent.status_code == 200, sent.text
        sent_file = client.uploads.complete(begun[0], part_ids=[]).file
        assert sent_file is not None
        assert client.files.content(sent_file.id).read() == data
        assert client.uploads.cancel(begun[1]).status == "cancelled"
        for file in client.files.list():
            assert client.files.delete(file.id).deleted
        assert list(client.files.list()) == []


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for what other processes do."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_the_api_runs_batches_under_its_role(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file becomes rows, with all figures of its batch and its tenant."""
    monkeypatch.setenv("SSL_CERT_FILE", guarded.environment["SSL_CERT_FILE"])
    key = create_key(client_options(guarded.environment), guarded.outputs, name="batches")
    settings = guarded.outputs.environment | {"TIDEMILL_WAIT_SECONDS": "1"}
    with (
        Processes({**guarded.worker, **settings}, guarded.folder) as processes,
        OpenAI(base_url=f"{guarded.api_url}/v1", api_key=key) as client,
        httpx.Client(base_url=guarded.api_url, headers={"Authorization": f"Bearer {key}"}) as http,
    ):
        processes.start("worker-of-api", sys.executable, "-m", "tidemill", "worker")
        made = client.batches.create(
            input_file_id=client.files.create(file=EXAMPLE, purpose="batch").id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            output_expires_after={"anchor": "created_at", "seconds": 3600},
        )
        wait_for(lambda: client.batches.retrieve(made.id).status == "completed")
        batch = client.batches.retrieve(made.id)
        assert batch.output_file_id is not None
        rows = client.files.content(batch.output_file_id).text.splitlines()
        results = http.get(f"/v1/batches/{made.id}/results").json()
        assert [row["custom_id"] for row in results["data"]] == [
            json.loads(row)["custom_id"] for row in rows
        ]
        assert results["complete_through"] == len(EXAMPLE.splitlines())

        def is_in_history() -> bool:
            buckets = http.get(f"/v1/batches/{made.id}/history").json()["data"]
            return sum(bucket["completed"] for bucket in buckets) == len(rows)

        wait_for(is_in_history)  # which workers tell every few seconds
        assert made.id in [each.id for each in client.batches.list()]
        ended = http.get("/v1/stats").json()["ended"]
        assert ended["batches"]["completed"] >= 1
        scraped = http.get("/metrics").text
        assert 'tidemill_ended_batches_total{status="completed"}' in scraped
    assert "AccessDenied" not in processes.read_log("worker-of-api")


FORBIDDEN: dict[str, Callable[[Guarded, Any], object]] = {
    "read results": lambda g, client: client("s3").get_object(
        Bucket=g.outputs.bucket, Key="output/example.jsonl"
    ),
    "write a result": lambda g, client: client("s3").put_object(
        Bucket=g.outputs.bucket, Key="output/example.jsonl", Body=b""
    ),
    "write an input": lambda g, client: client("s3").put_object(
        Bucket=g.outputs.bucket, Key="input/x.jsonl", Body=b""
    ),
    "delete": lambda g, client: client("s3").delete_object(Bucket=g.outputs.bucket, Key="work/x"),
    "take control messages": lambda g, client: client("sqs").receive_message(
        QueueUrl=g.outputs.control_queue
    ),
    # It makes items of its batches; that it makes no others MiniStack cannot show, which knows no
    # leading keys.
    "read the whole table": lambda g, client: client("dynamodb").scan(TableName=g.outputs.table),
    "list a tenant's batches": lambda g, client: client("dynamodb").query(
        TableName=g.outputs.table,
        IndexName="by_tenant",
        KeyConditionExpression="tenant = :t",
        ExpressionAttributeValues={":t": {"S": "default"}},
    ),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_worker_cannot(what: str, guarded: Guarded) -> None:
    """Operations outside a worker's duties are denied."""
    with pytest.raises(ClientError) as refused:
        FORBIDDEN[what](guarded, lambda service: guarded.client(service, guarded.worker))
    assert "AccessDenied" in refused.value.response["Error"]["Code"]
