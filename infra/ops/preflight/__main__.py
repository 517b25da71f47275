"""`python -m infra.ops.preflight`: reports at once what would stop a deployment after minutes.

It checks the configuration, the region and the credentials; with `--deploy` also whether an image
can be built here, whether the account has the roles, the quotas and, in the network's zones, the
machines, and where the weights are. It changes nothing. Checks that these credentials may not make,
or that AWS does not answer now, are skipped.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from infra.config import DEFAULT_PATH, Config, ConfigRefused, read_config
from infra.ops.preflight.account import (
    SHORT_TIMEOUTS,
    NotReady,
    check_account,
    check_roles,
    is_unanswered,
)
from infra.ops.preflight.builder import check_builder
from infra.ops.preflight.key import check_key
from infra.ops.preflight.machines import check_machines
from infra.ops.preflight.quotas import check_concurrency, check_gpu_quotas
from infra.ops.preflight.weights import check_weights
from tidemill.handler.aws.sync import aws_client
from tidemill.handler.errors import AwsError


def deployment_problems(config: Config, client: Any = None) -> Iterator[str]:
    """Yield a sentence for each missing requirement; print what a deployment can do without.

    `client` creates a boto3 client of a service.
    """
    client = client or partial(aws_client, config=SHORT_TIMEOUTS)
    of_workers = (
        lambda: check_roles(config, client("iam")),
        lambda: check_machines(config, client("ec2")),
        lambda: check_gpu_quotas(config, client("service-quotas")),
    )
    checks = (
        *(of_workers if config.starts_workers else ()),
        lambda: check_concurrency(client("lambda")),
        lambda: check_key(config, client("kms")),
        lambda: check_weights(config),
    )
    for check in checks:
        try:
            notes: Iterable[str] = check() or ()
            sys.stdout.writelines(f"{note}\n" for note in notes)
        except NotReady as exc:
            yield str(exc)
        except (BotoCoreError, ClientError, AwsError) as exc:
            if not is_unanswered(exc):
                yield f"AWS rejects a value of the configuration: {exc}"


def problems(path: Path, *, deploys: bool) -> Iterator[str]:
    """Yield a sentence for each missing requirement; print the account that would be used.

    If the configuration is wrong, nothing else is checked: it may be for another account.
    """
    try:
        config = read_config(path)
    except ConfigRefused as exc:
        yield str(exc)
        return
    try:
        sys.stdout.write(f"{check_account(config.image)}\n")
    except NotReady as exc:
        yield str(exc)
    else:
        if deploys:
            yield from deployment_problems(config)
    if deploys and config.starts_workers and not config.image:
        try:
            check_builder(os.environ)
        except NotReady as exc:
            yield str(exc)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return 0 if nothing is missing."""
    parser = argparse.ArgumentParser(prog="python -m infra.ops.preflight", description=__doc__)
    parser.add_argument("--config", type=Path, default=DEFAULT_PATH)
    parser.add_argument("--deploy", action="store_true", help="check all that a deployment needs")
    parsed = parser.parse_args(arguments)
    found = list(problems(parsed.config, deploys=parsed.deploy))
    sys.stderr.write("".join(f"{words}\n" for words in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
