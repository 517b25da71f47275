"""Workers on Kubernetes: flags of a plans file and a cluster, and the clients of both clouds."""

from __future__ import annotations

import argparse
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.offline.console.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tidemill.batch.fleet import FleetPlan
    from tidemill.handler.aws.sync import Aws
    from tidemill.handler.settings import Settings

_PLANS, _NAMESPACE, _API_SERVER = "TIDEMILL_PLANS", "TIDEMILL_NAMESPACE", "TIDEMILL_API_SERVER"


def add_cluster_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags that name a plans file and a cluster."""
    parser.add_argument(
        "--plans",
        type=Path,
        metavar="FILE",
        help=f"read the JSON file that describes the worker Jobs (default: {_PLANS})",
    )
    parser.add_argument(
        "--namespace",
        metavar="NAME",
        help=f"set the namespace of the Jobs (default: {_NAMESPACE}, or this pod's)",
    )
    parser.add_argument(
        "--api-server",
        metavar="URL",
        help="use this Kubernetes API server, such as a `kubectl proxy` (default: "
        f"{_API_SERVER}, or this pod's cluster)",
    )


def plans_file(arguments: argparse.Namespace) -> Path | None:
    """Return the path of the plans file; None if neither flag nor variable is set."""
    given = arguments.plans or os.environ.get(_PLANS)
    return Path(given) if given else None


def plans_reader(
    arguments: argparse.Namespace, path: Path, settings: Settings
) -> Callable[[], dict[str, FleetPlan]]:
    """Return a function that rereads the plans file; both raise Refused."""
    from tidemill.handler.fleet.kubernetes.api_server import own_namespace
    from tidemill.handler.fleet.kubernetes.plans import PlansRefused, read_plans

    namespace = arguments.namespace or os.environ.get(_NAMESPACE) or own_namespace()
    if not namespace:
        raise Refused(f"no namespace for the Jobs: pass --namespace or set {_NAMESPACE}")

    def read() -> dict[str, FleetPlan]:
        try:
            return read_plans(path, settings, namespace, os.environ)
        except PlansRefused as exc:
            raise Refused(str(exc)) from exc

    return read


@contextmanager
def connect_clouds(arguments: argparse.Namespace) -> Iterator[Aws]:
    """Yield the driver of operations on AWS and on the cluster; raises Refused."""
    from tidemill.handler.aws.sync import Aws
    from tidemill.handler.fleet.kubernetes.api_server import NoCluster, connect

    from .aws import make_client

    try:
        cluster = connect(os.environ, arguments.api_server or os.environ.get(_API_SERVER))
    except NoCluster as exc:
        raise Refused(str(exc)) from exc

    def client(service: str, **options: Any) -> Any:
        return cluster if service == "kubernetes" else make_client(service, **options)

    try:
        yield Aws(client)
    finally:
        cluster.close()


def settings_of_environment() -> Settings:
    """Return the deployment's settings from TIDEMILL_*; raises Refused with one line per error."""
    from pydantic import ValidationError

    from tidemill.handler.settings import read_settings

    try:
        return read_settings(os.environ)
    except ValidationError as exc:
        lines = [
            f"TIDEMILL_{'.'.join(str(part) for part in error['loc']).upper()}: {error['msg']}"
            for error in exc.errors()
        ]
        raise Refused("\n".join(lines)) from exc
