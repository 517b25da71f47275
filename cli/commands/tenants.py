"""`tidemill tenants`: what each tenant may use, and where it is told of the end of its batches."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from cli.deployment.place import add_place, need_cloud, run, table_of, tenant_name
from cli.errors import Refused
from cli.tables import columns
from cli.terminal import put, say

if TYPE_CHECKING:
    from handler.tenants.tenants import Tenant, TenantStore

_LIMITS = {
    "requests_per_minute": "calls of the API a minute",
    "requests_per_day": "calls of the API a day",
    "queued_lines": "lines of batches that have not ended",
    "bytes_per_day": "uploaded bytes a day",
}
_MAX_LIMIT = 10**15
_NONE_SET = "default"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tenants` to the command line."""
    parser = commands.add_parser(
        "tenants",
        help="limits and webhooks of the API's tenants",
        description="Sets and shows what a tenant of the API may use and where it is told of the "
        "end of its batches, with the AWS credentials of whoever may write the deployment's table.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    setting = actions.add_parser("set", help="change what is given", allow_abbrev=False)
    webhook = setting.add_mutually_exclusive_group()
    webhook.add_argument("--webhook-url", metavar="URL", help="is told of the end of each batch")
    webhook.add_argument("--no-webhook", action="store_true", help="tell nobody any more")
    setting.add_argument(
        "--new-webhook-secret",
        action="store_true",
        help="make another secret and print it; for a day the old one signs beside it",
    )
    for name, words in _LIMITS.items():
        setting.add_argument(
            f"--{name.replace('_', '-')}",
            type=_limit,
            metavar="N",
            help=f'{words}; 0 for no limit, "{_NONE_SET}" for the deployment\'s',
        )
    setting.set_defaults(command=command_set)
    showing = actions.add_parser("show", help="print what is set", allow_abbrev=False)
    showing.add_argument("--secret", action="store_true", help="print the webhook's secret too")
    showing.set_defaults(command=command_show)
    for action in (setting, showing):
        action.add_argument("name", metavar="NAME", type=tenant_name, help="the tenant")
        add_place(action)


def command_set(arguments: argparse.Namespace) -> int:
    """Change a tenant; a secret that is made for it is printed on standard output, alone."""
    changes = {
        name: None if limit == _NONE_SET else limit
        for name in _LIMITS
        if (limit := getattr(arguments, name)) is not None
    }
    changes |= {"webhook_url": None} if arguments.no_webhook else {}
    if not (changes or arguments.webhook_url is not None or arguments.new_webhook_secret):
        raise Refused("nothing is to be set: `tidemill tenants set --help` shows what can be")
    tenants = _tenants_of(arguments)
    if arguments.webhook_url is not None:
        changes["webhook_url"] = _webhook_url(arguments.webhook_url)
    table = tenants.name
    # The secret comes first: nobody is ever told anything that is not signed.
    is_new = arguments.new_webhook_secret or (
        changes.get("webhook_url") is not None
        and run(table, tenants.find(arguments.name)).webhook_secret is None
    )
    if is_new:
        made = run(table, tenants.renew_secret(arguments.name, int(time.time())))
        put(f"{made.webhook_secret}")
        say("this is the secret of the webhook: its receiver checks signatures with it")
    if changes:
        run(table, tenants.change(arguments.name, **changes))
    say(f"tenant {arguments.name} is set; the API knows it within a minute")
    return 0


def command_show(arguments: argparse.Namespace) -> int:
    """Print a table of what can be set, and to what it is set, on standard output."""
    tenants = _tenants_of(arguments)
    tenant = run(tenants.name, tenants.find(arguments.name))
    shown = _shown(tenant, with_secret=arguments.secret)
    put("\n".join(columns([(name, str(value)) for name, value in shown])))
    return 0


def _shown(tenant: Tenant, *, with_secret: bool) -> list[tuple[str, Any]]:
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
    from handler.batch.request import check_url
    from handler.errors import InvalidOption

    try:
        return check_url(text, "--webhook-url")
    except InvalidOption as exc:
        raise Refused(exc.message) from exc


def _tenants_of(arguments: argparse.Namespace) -> TenantStore:
    """Return the tenants of the deployment that the arguments or the environment name."""
    need_cloud("`tidemill tenants`")
    from handler.tenants.tenants import TenantStore

    return TenantStore(table_of(arguments))


def _limit(text: str) -> int | str:
    if text == _NONE_SET:
        return text
    if not (text.isascii() and text.isdigit()) or int(text) > _MAX_LIMIT:
        raise argparse.ArgumentTypeError(f"a whole number up to {_MAX_LIMIT}, or {_NONE_SET}")
    return int(text)
