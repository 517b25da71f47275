"""Tenants: their limits, webhooks and webhook secrets."""

from __future__ import annotations

import secrets
from base64 import b64encode
from dataclasses import dataclass, field, fields, replace
from threading import Lock
from typing import Any, Final

from pydantic import NonNegativeInt

from ..aws.calls import Operation
from ..aws.items import load
from ..aws.stores.store import META, Store
from ..settings import Limits

# Time for receivers to learn a new secret: until then both secrets sign.
OLD_SECRET_SECONDS: Final = 24 * 3600
KNOWN_SECONDS: Final = 60

_MAX_KNOWN = 1000
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Tenant:
    """Settings of a tenant. A limit of None means the deployment's.

    After a change of the secret the old one signs too, until `webhook_old_until` (Unix seconds).
    """

    name: str
    webhook_url: str | None = field(default=None, repr=False)
    webhook_secret: str | None = field(default=None, repr=False)
    webhook_old_secret: str | None = field(default=None, repr=False)
    webhook_old_until: int = 0
    requests_per_day: NonNegativeInt | None = None
    queued_lines: NonNegativeInt | None = None
    bytes_per_day: NonNegativeInt | None = None
    requests_per_minute: NonNegativeInt | None = None
    gpu_hours_per_day: NonNegativeInt | None = None

    def limits(self, default: Limits) -> Limits:
        """Return its limits, given the deployment's defaults."""
        names = (each.name for each in fields(Limits))
        own = {name: limit for name in names if (limit := getattr(self, name)) is not None}
        return replace(default, **own)

    def secrets_at(self, now: float) -> tuple[str, ...]:
        """Return the secrets that sign webhook events, the present one first."""
        known = [
            self.webhook_secret,
            self.webhook_old_secret if now < self.webhook_old_until else None,
        ]
        return tuple(secret for secret in known if secret is not None)


class TenantStore(Store):
    """Creates operations on the tenants in a deployment's table."""

    __slots__ = ()

    def find(self, name: str) -> Operation[Tenant]:
        """Return the current settings of a tenant; defaults if none were ever set."""
        fields = yield from self.get(_item_key(name))
        return load(Tenant, fields) if fields else Tenant(name)

    def change(self, name: str, **changes: Any) -> Operation[Tenant]:
        """Set fields of a tenant, remove those that are None, and return it."""
        fields = yield from self.update(_item_key(name), {"name": name, **changes}, "", {})
        return load(Tenant, fields)

    def renew_secret(self, name: str, now: int) -> Operation[Tenant]:
        """Give a tenant a new secret; the previous one also signs for another day."""
        tenant = yield from self.find(name)
        return (
            yield from self.change(
                name,
                webhook_secret=new_secret(),
                webhook_old_secret=tenant.webhook_secret,
                webhook_old_until=now + OLD_SECRET_SECONDS,
            )
        )


class KnownTenants:
    """The tenants that a process has looked up; each is read at most once a minute."""

    def __init__(self, store: TenantStore) -> None:
        self._store = store
        self._known: dict[str, tuple[float, Tenant]] = {}
        self._changing = Lock()

    def find(self, name: str, now: float) -> Operation[Tenant]:
        """Return a tenant's settings, at most a minute old."""
        read_at, tenant = self._known.get(name, (0.0, None))
        # Allows times of less than a second before: some callers round to whole seconds.
        if tenant is None or not -1 < now - read_at < KNOWN_SECONDS:
            tenant = yield from self.refresh(name, now)
        return tenant

    def refresh(self, name: str, now: float) -> Operation[Tenant]:
        """Return the current settings of a tenant, and cache them."""
        tenant = yield from self._store.find(name)
        with self._changing:
            self._known.pop(name, None)
            while len(self._known) >= _MAX_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[name] = (now, tenant)
        return tenant


def new_secret() -> str:
    """Return a new secret in the format of Standard Webhooks."""
    return f"whsec_{b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()}"


def _item_key(name: str) -> dict[str, object]:
    return {"pk": f"TENANT#{name}", "sk": META}
