"""`python -m infra.ops.zones`: prints the region's zones, for the templates to have them all.

A template can count no more than two zones of a region that it does not know, and the CDK is not
to ask. Who may not ask either gets those two.
"""

from __future__ import annotations

import sys
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from tidemill.handler.aws.sync import aws_client


def region_zones(ec2: Any) -> list[str]:
    """Return the availability zones that this account may use, by their names.

    `ec2` is a boto3 client of the region.
    """
    # One that is impaired today is kept: its subnet must not go while machines stand in it.
    found = ec2.describe_availability_zones(
        Filters=[{"Name": "zone-type", "Values": ["availability-zone"]}]
    )
    return sorted(zone["ZoneName"] for zone in found["AvailabilityZones"])


def main() -> int:
    """Print the zones with commas between them, or nothing where EC2 does not tell them."""
    try:
        sys.stdout.write(f"{','.join(region_zones(aws_client('ec2')))}\n")
    except (BotoCoreError, ClientError) as exc:
        sys.stderr.write(f"zones: {exc}; workers get two of AWS's choice\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
