"""A private API and other requirements of security reviews, deployed to an emulator."""

from __future__ import annotations

from pathlib import Path

import boto3
import httpx
import pytest

from infra.config import DEFAULT_PATH
from localstack.ministack import environment_for
from localstack.stacks import client_options, deploy
from tests.emulators import Emulator
from tidemill.handler.aws.sync import Aws
from tidemill.handler.tenants.keys import KeyStore

KEYS = """name = "private"
api = "private"
vpc_endpoint_ids = ["vpce-0123456789abcdef0"]
kms_key = "{key}"
tracing = true
alarm_messages = "chat"
role_path = "/platform/"
permissions_boundary = "arn:aws:iam::000000000000:policy/boundary"
"""


@pytest.mark.long
def test_a_private_api_answers_under_the_paths_of_a_public_one(
    ministack: Emulator, tmp_path: Path
) -> None:
    """Requests name a stage and a key: pages, lists, refusals, and a file of binary content."""
    endpoint = ministack.client("s3").meta.endpoint_url
    environment = environment_for(endpoint)
    options = client_options(environment)
    key = boto3.client("kms", **options).create_key()["KeyMetadata"]["Arn"]
    config = tmp_path / "config.toml"
    given = DEFAULT_PATH.read_text(encoding="utf-8")
    config.write_text(given.replace('name = "tidemill"\n', KEYS.format(key=key), 1))
    outputs = deploy(environment, tmp_path, config=config, name="private")
    api_id, _, rest = outputs.api_url.removeprefix("https://").partition("-")
    assert rest.startswith("vpce-0123456789abcdef0.execute-api.")

    aws = Aws(lambda service, **_: boto3.client(service, **options))
    token = aws.run(KeyStore(outputs.table).create(tenant="search", name="x", now=1))
    headers = {"host": f"{api_id}.execute-api.localhost", "authorization": f"Bearer {token}"}
    with httpx.Client(base_url=endpoint, headers=headers, timeout=60) as http:
        assert http.get("/v1/models").json()["data"][0]["id"] == "tidemill-demo"
        assert http.get("/v1/batches", params={"limit": 2}).json()["data"] == []
        assert http.get("/dashboard").text.startswith("<!doctype html>")
        refused = http.get("/v1/models", headers={"authorization": "Bearer tm_"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        content = b"\x00\xff{}\n"
        file = http.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", content)}
        ).json()
        assert (file["bytes"], file["filename"]) == (len(content), "a.jsonl")
