"""`python -m infra.ops.retained`: lists what `make destroy` leaves behind, and how to remove it."""

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
    """Return what is kept of a deployment."""
    return [
        f"The bucket {outputs.bucket} is kept with every file and result in it. To delete it:",
        f"  empty it of all versions in the console, then: aws s3 rb s3://{outputs.bucket}",
        f"The table {outputs.table} is kept with what it knows of batches and keys. To delete it:",
        f"  aws dynamodb delete-table --table-name {outputs.table}",
        "Batches that run now stop where they are; no later deployment goes on with them.",
        "Everything else goes: queues, Lambdas, API, workers, network, logs.",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is kept of the deployment that a configuration names."""
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
