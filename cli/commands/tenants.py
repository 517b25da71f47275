"""`tidemill tenants`: sets rate limits, quotas and webhooks of tenants."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from tidemill.offline.console.errors import Refused
from tidemill.offline.console.tables import columns
from tidemill.offline.console.terminal import log, print_output

from ..deployment.resources import add_deployment_flags, require_cloud, run, table_name, tenant_name

if TYPE_CHECKING:
    from tidemill.handler.aws.stores.usage import UsageStore
    from tidemill.handler.tenants.tenants import Tenant, TenantStore

_LIMITS = {
    "requests_per_minute": "limit API calls per minute",
    "requests_per_day": "limit API calls per day",
    "queued_lines": "limit the lines in batches that have not ended",
    "bytes_per_day": "limit uploaded bytes per day",
    "gpu_hours_per_day": "limit GPU hours per day",
}
_MAX_LIMIT = 10**15
_NONE_SET = "default"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tenants` to the command line."""
    parser = commands.add_parser(
        "tenants",
        help="set and show the limits and webhooks of tenants",
        description="Set and show the limits of an API tenant and its webhook for ended "
        "batches, with AWS credentials.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    setting = actions.add_parser(
        "set",
        is_destructive=True,
        help="change the given settings",
        description="Change the given settings. A limit is a number, 0 for no limit, or "
        f"`{_NONE_SET}` for the deployment's limit.",
        allow_abbrev=False,
    )
    webhook = setting.add_mutually_exclusive_group()
    webhook.add_argument("--webhook-url", metavar="URL", help="call this URL when a batch ends")
    webhook.add_argument("--no-webhook", action="store_true", help="remove the webhook")
    setting.add_argument(
        "--new-webhook-secret",
        action="store_true",
        help="create a new secret and print it; the old one also signs for another day",
    )
    for name, words in _LIMITS.items():
        setting.add_argument(
            f"--{name.replace('_', '-')}",
            type=_limit,
            metavar="N",
            help=words,
        )
    setting.set_defaults(command=command_set)
    showing = actions.add_parser("show", help="print the settings", allow_abbrev=False)
    showing.add_argument("--secret", action="store_true", help="also print the webhook's secret")
    showing.set_defaults(command=command_show)
    for action in (setting, showing):
        action.add_argument("name", metavar="NAME", type=tenant_name, help="name the tenant")
        add_deployment_flags(action)


def command_set(arguments: argparse.Namespace) -> int:
    """Change a tenant; standard output contains only a new webhook secret, if any."""
    changes = {
        name: None if limit == _NONE_SET else limit
        for name in _LIMITS
        if (limit := getattr(arguments, name)) is not None
    }
    changes |= {"webhook_url": None} if arguments.no_webhook else {}
    if not (changes or arguments.webhook_url is not None or arguments.new_webhook_secret):
        raise Refused("no setting was given: list the settings with `tidemill tenants set --help`")
    tenants = _tenants_of(arguments)
    if arguments.webhook_url is not None:
        changes["webhook_url"] = _webhook_url(arguments.webhook_url)
    table = tenants.name
    # The secret first, so that every webhook call is signed.
    is_new = arguments.new_webhook_secret or (
        changes.get("webhook_url") is not None
        and run(table, tenants.find(arguments.name)).webhook_secret is None
    )
    if is_new:
        tenant = run(table, tenants.renew_secret(arguments.name, int(time.time())))
        print_output(f"{tenant.webhook_secret}")
        log("this is the webhook's secret, with which its receiver verifies signatures")
    if changes:
        run(table, tenants.change(arguments.name, **changes))
    log(f"tenant {arguments.name} was changed; the API applies the change within a minute")
    return 0


def command_show(arguments: argparse.Namespace) -> int:
    """Print a table of the tenant's settings on standard output."""
    tenants = _tenants_of(arguments)
    tenant = run(tenants.name, tenants.find(arguments.name))
    spent = run(tenants.name, _usage_of(tenants).gpu_seconds_today(arguments.name, time.time()))
    rows = _settings_rows(tenant, with_secret=arguments.secret)
    rows.append(("gpu_hours_today", f"{spent / 3600:.2f}"))
    print_output("\n".join(columns([(name, str(value)) for name, value in rows])))
    return 0


def _settings_rows(tenant: Tenant, *, with_secret: bool) -> list[tuple[str, Any]]:
    secret = tenant.webhook_secret
    if secret is not None and not with_secret:
        secret = "set"
    limits: list[tuple[str, Any]] = [
        (name, _NONE_SET if (limit := getattr(tenant, name)) is None else limit) for name in _LIMITS
    ]
    return [
        ("webhook_url", tenant.webhook_url or "none"),
        ("webhook_secret", secret or "none"),
        *limits,
    ]


def _webhook_url(text: str) -> str:
    from tidemill.batch.batch_request import check_url
    from tidemill.batch.errors import InvalidOption

    try:
        return check_url(text, "--webhook-url")
    except InvalidOption as exc:
        raise Refused(exc.message) from exc


def _tenants_of(arguments: argparse.Namespace) -> TenantStore:
    """Return the tenant store of the deployment."""
    require_cloud("`tidemill tenants`")
    from tidemill.handler.tenants.tenants import TenantStore

    return TenantStore(table_name(arguments))


def _usage_of(tenants: TenantStore) -> UsageStore:
    from tidemill.handler.aws.stores.usage import UsageStore

    return UsageStore(tenants.name)


def _limit(text: str) -> int | str:
    if text == _NONE_SET:
        return text
    if not (text.isascii() and text.isdigit()) or int(text) > _MAX_LIMIT:
        raise argparse.ArgumentTypeError(
            f"use a whole number from 0 to {_MAX_LIMIT}, or {_NONE_SET}"
        )
    return int(text)
