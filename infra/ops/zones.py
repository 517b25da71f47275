"""`python -m infra.ops.zones`: prints the region's zones, so that templates contain all of them.

A template of an unknown region can have at most two zones, and the CDK may not look them up. If
EC2 does not reply, the deployment stops: with two zones it would delete the other subnets.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from botocore.exceptions import BotoCoreError, ClientError

from infra.config import DEFAULT_PATH, ConfigRefused, read_config
from tidemill.handler.aws.sync import aws_client

_DENIED: Final = {"AccessDenied", "UnauthorizedOperation"}


def region_zones(ec2: Any) -> list[str]:
    """Return the names of the availability zones that this account may use.

    `ec2` is a boto3 client of the region.
    """
    # An impaired zone is included: its subnet must not be deleted while machines are in it.
    found = ec2.describe_availability_zones(
        Filters=[{"Name": "zone-type", "Values": ["availability-zone"]}]
    )
    return sorted(zone["ZoneName"] for zone in found["AvailabilityZones"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the zones separated by commas, or nothing if the network needs none."""
    parser = argparse.ArgumentParser(prog="python -m infra.ops.zones", description=__doc__)
    parser.add_argument("--config", type=Path, default=DEFAULT_PATH)
    parsed = parser.parse_args(arguments)
    try:
        zones = region_zones(aws_client("ec2")) if read_config(parsed.config).lacks_zones else []
    except ConfigRefused as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    except (BotoCoreError, ClientError) as exc:
        sys.stderr.write(f"{_refusal(exc)}\n")
        return 1
    sys.stdout.write(f"{','.join(zones)}\n")
    return 0


def _refusal(exc: BotoCoreError | ClientError) -> str:
    if isinstance(exc, ClientError) and exc.response["Error"]["Code"] in _DENIED:
        return (
            "These credentials may not list the region's zones "
            "(ec2:DescribeAvailabilityZones): name them, sorted, in `zones` of [network]."
        )
    return (
        f"EC2 did not return the region's zones: {str(exc).rstrip('.')}. Try again, or name "
        "them, sorted, in `zones` of [network]."
    )


if __name__ == "__main__":
    sys.exit(main())
