"""`python -m infra.ops.retained`: lists what `make destroy` retains, and how to delete it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from infra.config import DEFAULT_PATH, ConfigRefused, read_config
from infra.ops.outputs import NotDeployed, Outputs, read_outputs
from tidemill.handler.aws.sync import aws_client


def sentences(outputs: Outputs) -> list[str]:
    """Return the retained resources of a deployment."""
    return [
        f"The bucket {outputs.bucket} is retained with all files and results. To delete it:",
        f"  delete all versions in the console, then run: aws s3 rb s3://{outputs.bucket}",
        f"The table {outputs.table} is retained with its batches and keys. To delete it:",
        f"  aws dynamodb delete-table --table-name {outputs.table}",
        "Batches in progress stop; no later deployment resumes them.",
        "Everything else is deleted: queues, Lambdas, API, workers, network, logs.",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the retained resources of the configured deployment."""
    parser = argparse.ArgumentParser(prog="python -m infra.ops.retained", description=__doc__)
    parser.add_argument("--config", type=Path, default=DEFAULT_PATH)
    try:
        name = read_config(parser.parse_args(arguments).config).name
        outputs = read_outputs(aws_client("cloudformation"), name, needs_api=False)
    except (ConfigRefused, NotDeployed, BotoCoreError, ClientError) as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    sys.stdout.write("\n".join([*sentences(outputs), ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
