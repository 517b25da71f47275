"""`python -m infra.ops.preflight.concurrency`: prints how many Lambdas the account runs at a time.

Templates cannot ask, and mappings of queues must fit into it. Where Lambda does not answer, nothing
is printed: the deployment is made for the usual limit.
"""

from __future__ import annotations

import sys
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from infra.ops.preflight.account import SHORT_TIMEOUTS
from tidemill.handler.aws.sync import aws_client


def account_concurrency(lambda_: Any) -> int:
    """Return the account's concurrency for functions without reserved concurrency."""
    limit = lambda_.get_account_settings()["AccountLimit"]
    return int(limit.get("UnreservedConcurrentExecutions", limit["ConcurrentExecutions"]))


def main() -> int:
    """Print the number, or an empty line and, to stderr, where it can be named."""
    try:
        found = str(account_concurrency(aws_client("lambda", config=SHORT_TIMEOUTS)))
    except (BotoCoreError, ClientError) as exc:
        found = ""
        sys.stderr.write(
            f"Lambda does not say how many functions the account runs at a time: {exc}. The usual "
            "1,000 are assumed; name another number in `lambda_concurrency`.\n"
        )
    sys.stdout.write(f"{found}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
