"""Result key: identifies a request, so that its result can be found again, and seals the result.

A result is found again only if another run would compute the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from pydantic_core import to_json

from tidemill.protocol import routes
from tidemill.protocol.errors import ProtocolError, RequestError
from tidemill.protocol.fetched_urls import fetched_urls
from tidemill.protocol.names import name_of_model
from tidemill.protocol.prompt_key import is_determined

VERSION: Final = 3
"""Version of keys and records; a change of either makes earlier results unfindable."""

KEY_BYTES: Final = 16
MAX_BYTES: Final = 16 * 2**30
"""What kept results take at most, unless a user says otherwise."""

_CHECKSUM_BYTES: Final = 16
_WITHOUT_EFFECT: Final = frozenset({"user", "metadata", "safety_identifier"})
"""Parameters of a body that no reply depends on."""

_DETERMINED: Final = (
    routes.EMBEDDINGS,
    routes.SCORE,
    routes.RERANK,
    routes.GENERATIVE_SCORING,
)
"""Routes whose replies are the same whenever they are computed."""


class CacheError(ProtocolError):
    """A store of results that cannot be read or written; the message says why."""

    code = "result_cache"


class CacheDamaged(CacheError):
    """A store of results whose bytes are not those that were written."""


class Scope(NamedTuple):
    """What decides results beside requests, as a digest; `model` is for people to read."""

    digest: bytes
    model: str


class Kept(NamedTuple):
    """JSON of a kept reply, which was made for the line of a digest at a time."""

    digest: str
    created: int
    body: bytes

    def reply_for(self, digest: str, created: int) -> bytes:
        """Return the reply as it is for the line of another digest, created at this time."""
        ours = self.body.replace(self.digest.encode(), digest.encode())
        return ours.replace(b'"created":%d' % self.created, b'"created":%d' % created, 1)

    def sealed(self, key: bytes) -> bytes:
        """Return the reply as a record, behind a checksum of the key and the record."""
        record = b"%s %d %s" % (self.digest.encode(), self.created, self.body)
        return _checksum(key, record) + record


def unsealed(key: bytes, record: object) -> Kept | None:
    """Return the reply that was sealed with a key; None for any other bytes, or another key."""
    if not isinstance(record, bytes):
        return None
    checksum, record = record[:_CHECKSUM_BYTES], record[_CHECKSUM_BYTES:]
    if checksum != _checksum(key, record):
        return None
    digest, created, body = record.split(b" ", 2)
    return Kept(digest.decode(), int(created), body)


def _checksum(key: bytes, record: bytes) -> bytes:
    digest = blake2b(key, digest_size=_CHECKSUM_BYTES)
    digest.update(record)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class ResultKeys:
    """Keys of the requests to an engine with these served names, adapters among them.

    Lookup and storage both use `key_of`, with the body that the engine gets. With `sampled`,
    requests whose results are drawn at random have keys, too.
    """

    served_names: Sequence[str]
    sampled: bool = False

    def key_of(self, url: str, body: Mapping[str, Any], digest: str) -> bytes | None:
        """Return the key of a line's request; None if its result is not reused.

        Equal keys mean equal prompts, constraints and parameters: only the order of the body's own
        fields is ignored, because templates and grammars can depend on any other. A sampled
        result is keyed by the line's `digest`, which also keys its randomness: each line has its
        own sample. Content behind a URL may change, so a request that fetches any has no key.
        """
        route = routes.find_route(url)
        if route is None:
            return None
        is_sampled = route not in _DETERMINED and not is_determined(body)
        if (is_sampled and not self.sampled) or fetched_urls(body):
            return None
        try:
            model = name_of_model(body, self.served_names)
            fields = {**body, "model": model}
            pairs = [[name, fields[name]] for name in sorted(fields.keys() - _WITHOUT_EFFECT)]
            text = to_json([VERSION, route.name, digest if is_sampled else None, pairs])
        except (RequestError, ValueError):
            return None  # it is refused
        return blake2b(text, digest_size=KEY_BYTES).digest()
