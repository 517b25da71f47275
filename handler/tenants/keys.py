"""API keys: shown once, stored as a hash, revoked and never deleted."""

from __future__ import annotations

import hmac
import re
import secrets
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from tidemill.batch.object_keys import check_tenant

from ..aws.calls import Operation
from ..aws.items import dump, load, to_item
from ..aws.stores.store import META, Store, condition
from ..errors import ConditionFailed

_TOKEN: Final = re.compile(r"tm_([0-9a-f]{16})_([A-Za-z0-9_-]{43})", re.ASCII)
_LISTED = "KEYS"
# No secret has this hash.
_UNKNOWN: Final = {"id": "", "tenant": "", "name": "", "secret_hash": "0" * 64, "created_at": 0}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key in the table: its tenant, and the hash of its secret.

    The secret has 256 random bits, so a plain hash cannot be reversed: slow hashes protect
    passwords that people choose. An administrator's key also shows the use of all tenants.
    """

    id: str
    tenant: str
    name: str
    secret_hash: str
    created_at: int
    revoked_at: int | None = None
    is_admin: bool = False


class KeyStore(Store):
    """Creates operations on the keys in a deployment's table."""

    __slots__ = ()

    def create(self, *, tenant: str, name: str, now: int, is_admin: bool = False) -> Operation[str]:
        """Record a new key and return its token, which cannot be read again.

        Raises InvalidOption for an invalid tenant name.
        """
        key_id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        key = ApiKey(key_id, check_tenant(tenant), name, _hash(secret), now, is_admin=is_admin)
        new = {
            "TableName": self.name,
            "Item": to_item(_item_key(key_id) | dump(key)),
            **condition("attribute_not_exists(pk)", {}),
        }
        listed = {"TableName": self.name, "Item": to_item({"pk": _LISTED, "sk": f"KEY#{key_id}"})}
        yield self.transact({"Put": new}, {"Put": listed})
        return f"tm_{key_id}_{secret}"

    def check(self, token: str) -> Operation[ApiKey | None]:
        """Return the key of a token, or None if it is unknown, wrong or revoked."""
        match = _TOKEN.fullmatch(token)
        if match is None:
            return None
        fields = yield from self.get(_item_key(match[1]))
        # An unknown ID is compared like any other, so that the timing does not reveal it.
        key = load(ApiKey, fields or _UNKNOWN)
        is_right = hmac.compare_digest(key.secret_hash, _hash(match[2]))
        return key if fields and is_right and key.revoked_at is None else None

    def revoke(self, key_id: str, now: int) -> Operation[ApiKey | None]:
        """Revoke a key permanently and return it, or None if there is none with this ID."""
        try:
            fields = yield from self.update(
                _item_key(key_id),
                {"revoked_at": now},
                "attribute_exists(pk) AND attribute_not_exists(#revoked_at)",
                {},
            )
        except ConditionFailed as exc:
            return load(ApiKey, exc.item) if exc.item else None
        return load(ApiKey, fields)

    def list_keys(self, tenant: str | None = None) -> Operation[list[ApiKey]]:
        """Return a tenant's keys, or all keys, oldest first; revoked ones stay listed."""
        found = []
        for listed in (yield from self.query(_LISTED, "KEY#")):
            fields = yield from self.get({"pk": listed["sk"], "sk": META})
            if fields:
                found.append(load(ApiKey, fields))
        own = (key for key in found if tenant in {None, key.tenant})
        return sorted(own, key=lambda key: (key.created_at, key.id))


def is_key(text: str) -> bool:
    """Return whether a text has the format of a key."""
    return _TOKEN.fullmatch(text) is not None


def key_id_of(token_or_id: str) -> str:
    """Return the ID in a token, or the ID itself: users have one or the other."""
    match = _TOKEN.fullmatch(token_or_id)
    return match[1] if match else token_or_id


def _hash(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()


def _item_key(key_id: str) -> dict[str, object]:
    return {"pk": f"KEY#{key_id}", "sk": META}
