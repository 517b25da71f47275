"""`python -m infra.ops.stop`: stops every worker of a deployment before its stacks are deleted.

No more workers are started, and their batches are not awaited: a stopping worker writes its
finished rows and ends within two minutes. After that no task keeps the cluster from deletion.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from infra.config import DEFAULT_PATH, ConfigRefused, read_config
from infra.ops.outputs import NotDeployed, read_outputs
from tidemill.handler.aws.sync import Aws, aws_client
from tidemill.handler.deployment import Deployment
from tidemill.handler.errors import AwsError
from tidemill.handler.fleet.circuit_breaker import open_by_operator
from tidemill.handler.fleet.stop import list_workers, stop_workers
from tidemill.handler.settings import read_settings

_POLL_SECONDS = 5.0
# ECS and SageMaker kill a worker that is still running two minutes after its stop signal.
_MAX_POLLS = 36


def stop_all(
    aws: Aws,
    deployment: Deployment,
    now: int,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Open every fleet's circuit breaker and stop its workers; return models with workers left."""
    plans = aws.run(deployment.fleet_plans.read())
    for model, plan in plans.items():
        aws.run(deployment.fleets.change(model, partial(open_by_operator, plan=plan, now=now)))
    left = plans
    for _ in range(_MAX_POLLS):
        # Repeated each time: a Lambda may have been about to start one.
        for plan in left.values():
            aws.run(stop_workers(deployment, plan))
        left = {
            model: plan for model, plan in left.items() if aws.run(list_workers(deployment, plan))
        }
        if not left:
            break
        sleep(_POLL_SECONDS)
    return sorted(left)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prompt, then stop the workers of the configured deployment."""
    parser = argparse.ArgumentParser(prog="python -m infra.ops.stop", description=__doc__)
    parser.add_argument("--config", type=Path, default=DEFAULT_PATH)
    parser.add_argument("--yes", action="store_true", help="skip the prompt")
    parsed = parser.parse_args(arguments)
    try:
        name = read_config(parsed.config).name
        outputs = read_outputs(aws_client("cloudformation"), name, needs_api=False)
        if not parsed.yes and not _confirm(name):
            return 1
        aws, deployment = Aws(), Deployment(read_settings(outputs.environment))
        left = stop_all(aws, deployment, int(time.time()))
    except (ConfigRefused, NotDeployed, AwsError, BotoCoreError, ClientError) as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    if left:
        sys.stderr.write(
            f"Workers of {', '.join(left)} are still running after the stop request: check them in "
            "the console, then run this command again.\n"
        )
        return 1
    sys.stdout.write("All workers have ended.\n")
    return 0


def _confirm(name: str) -> bool:
    sys.stdout.write(
        f"To stop its workers and delete its stacks, type the deployment's name ({name}): "
    )
    sys.stdout.flush()
    if sys.stdin.readline().strip() == name:
        return True
    sys.stderr.write(f"The name does not match {name}: nothing was changed.\n")
    return False


if __name__ == "__main__":
    sys.exit(main())
