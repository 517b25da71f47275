"""`python -m infra.ops.preflight.concurrency`: prints the account's Lambda concurrency.

Templates cannot look it up, and queue mappings must fit into it. If Lambda does not reply, nothing
is printed: the deployment assumes the usual limit.
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
    """Print the number, or an empty line with advice on stderr."""
    try:
        found = str(account_concurrency(aws_client("lambda", config=SHORT_TIMEOUTS)))
    except (BotoCoreError, ClientError) as exc:
        found = ""
        sys.stderr.write(
            f"Lambda did not return the account's concurrency limit: {exc}. The usual 1,000 is "
            "assumed; set `lambda_concurrency` for another number.\n"
        )
    sys.stdout.write(f"{found}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
