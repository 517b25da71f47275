"""`tidemill keys`: creates, lists and revokes API keys of a deployment."""

from __future__ import annotations

import argparse
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tidemill.offline.console.errors import Refused
from tidemill.offline.console.tables import columns
from tidemill.offline.console.terminal import log, print_output

from ..deployment.resources import add_deployment_flags, require_cloud, run, table_name, tenant_name

if TYPE_CHECKING:
    from tidemill.handler.tenants.keys import ApiKey, KeyStore

_MAX_NAME_LENGTH = 100
_HEADS = ("ID", "TENANT", "CREATED", "STATE", "NAME")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `keys` to the command line."""
    parser = commands.add_parser(
        "keys",
        help="create, list and revoke API keys",
        description="Create, list and revoke API keys of a deployment, with AWS credentials.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    create = actions.add_parser("create", help="create a key and print it once", allow_abbrev=False)
    create.add_argument("--name", required=True, type=_name, help="name the key's purpose")
    create.add_argument(
        "--tenant",
        default="default",
        type=tenant_name,
        help="set the key's tenant (default: default)",
    )
    create.add_argument(
        "--admin",
        action="store_true",
        help="also show the monthly use of all tenants in the dashboard",
    )
    create.set_defaults(command=command_create)
    listing = actions.add_parser(
        "list", help="list all keys, including revoked ones", allow_abbrev=False
    )
    listing.add_argument("--tenant", type=_name, help="list only this tenant's keys")
    listing.set_defaults(command=command_list)
    revoke = actions.add_parser(
        "revoke", is_destructive=True, help="revoke a key", allow_abbrev=False
    )
    revoke.add_argument("key", help="give the key's ID, or the key itself")
    revoke.set_defaults(command=command_revoke)
    for action in (create, listing, revoke):
        add_deployment_flags(action)


def command_create(arguments: argparse.Namespace) -> int:
    """Print a new key on standard output, alone."""
    keys = _keys_of(arguments)
    making = keys.create(
        tenant=arguments.tenant,
        name=arguments.name,
        now=int(time.time()),
        is_admin=arguments.admin,
    )
    print_output(run(keys.name, making))
    log("store the key now: it cannot be shown again")
    return 0


def command_list(arguments: argparse.Namespace) -> int:
    """Print a table of the keys on standard output."""
    keys = _keys_of(arguments)
    found = run(keys.name, keys.list_keys(arguments.tenant))
    if found:
        print_output("\n".join(columns([_HEADS, *map(_cells, found)])))
    else:
        log("there are no keys: create one with `tidemill keys create --name NAME`")
    return 0


def command_revoke(arguments: argparse.Namespace) -> int:
    """Revoke a key; idempotent."""
    keys = _keys_of(arguments)
    from tidemill.handler.tenants.keys import key_id_of

    key_id = key_id_of(arguments.key)
    key = run(keys.name, keys.revoke(key_id, now=int(time.time())))
    if key is None:
        raise Refused("key not found: list the IDs with `tidemill keys list`")
    log(f"key {key.id} ({key.name}) was revoked: the API now rejects it")
    return 0


def _name(text: str) -> str:
    if not text.isprintable() or not 1 <= len(text) <= _MAX_NAME_LENGTH or text != text.strip():
        raise argparse.ArgumentTypeError(
            f"use 1 to {_MAX_NAME_LENGTH} printable characters, without leading or trailing spaces"
        )
    return text


def _cells(key: ApiKey) -> tuple[str, ...]:
    state = f"revoked {_date(key.revoked_at)}" if key.revoked_at is not None else "valid"
    state += ", admin" if key.is_admin else ""
    return (key.id, key.tenant, _date(key.created_at), state, key.name)


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _keys_of(arguments: argparse.Namespace) -> KeyStore:
    """Return the key store of the deployment."""
    require_cloud("`tidemill keys`")
    from tidemill.handler.tenants.keys import KeyStore

    return KeyStore(table_name(arguments))
