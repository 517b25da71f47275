"""`python -m infra.ops.retained`: lists what `make destroy` retains, and how to delete it."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from infra.config import DEFAULT_PATH, ConfigRefused, read_config
from infra.ops.outputs import NotDeployed, Outputs, read_outputs
from tidemill.handler.aws.sync import aws_client


def _deletion(bucket: str, region: str) -> str:
    """Return a shell command that deletes a bucket with all versions of its objects."""
    code = (
        f"import boto3; bucket = boto3.resource('s3', '{region}').Bucket('{bucket}'); "
        "bucket.object_versions.delete(); bucket.delete()"
    )
    return f'{shlex.quote(sys.executable)} -c "{code}"'


def sentences(outputs: Outputs, region: str) -> list[str]:
    """Return the retained resources of a deployment."""
    return [
        f"The bucket {outputs.bucket} is retained with all files and results. To delete it:",
        f"  {_deletion(outputs.bucket, region)}",
        f"The table {outputs.table} is retained with its batches and keys. To delete it:",
        f"  aws dynamodb delete-table --region {region} --table-name {outputs.table}",
        "Batches in progress stop. A later deployment creates another bucket and another table.",
        "Everything else is deleted: queues, Lambdas, API, workers, network, logs.",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the retained resources of the configured deployment."""
    parser = argparse.ArgumentParser(prog="python -m infra.ops.retained", description=__doc__)
    parser.add_argument("--config", type=Path, default=DEFAULT_PATH)
    try:
        name = read_config(parser.parse_args(arguments).config).name
        cloudformation = aws_client("cloudformation")
        outputs = read_outputs(cloudformation, name, needs_api=False)
    except (ConfigRefused, NotDeployed, BotoCoreError, ClientError) as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    sys.stdout.write("\n".join([*sentences(outputs, cloudformation.meta.region_name), ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
