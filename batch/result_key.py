"""Result key: identifies a request, so that its result can be reused, and seals the result.

A result is reused only if another run would compute the same one.
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
"""Version of keys and records; changing it makes earlier results unfindable."""

KEY_BYTES: Final = 16
MAX_BYTES: Final = 16 * 2**30
"""Default limit of the size of stored results."""

_CHECKSUM_BYTES: Final = 16
_WITHOUT_EFFECT: Final = frozenset({"user", "metadata", "safety_identifier", "priority"})
"""Parameters of a body that do not affect the reply."""

_SHOWN: Final = frozenset({"metadata"})
"""Those of them that a response contains."""

_DETERMINED: Final = (
    routes.EMBEDDINGS,
    routes.COHERE_EMBED,
    routes.SCORE,
    routes.RERANK,
    routes.CLASSIFY,
    routes.MODERATIONS,
    routes.POOLING,
    routes.GENERATIVE_SCORING,
    routes.DECISIONS,
    routes.SYSTEM_ONE,
)
"""Routes whose replies are deterministic."""


class CacheError(ProtocolError):
    """A result store that cannot be read or written; the message says why."""

    code = "result_cache"


class CacheDamaged(CacheError):
    """A result store whose bytes are not the ones that were written."""


class Scope(NamedTuple):
    """Digest of everything but the request that a result depends on; `model` is a readable name."""

    digest: bytes
    model: str


class Kept(NamedTuple):
    """JSON of a stored reply, with the digest of its line and its creation time."""

    digest: str
    created: int
    body: bytes

    def reply_for(self, digest: str, created: int) -> bytes:
        """Return the reply adapted to the line of another digest and this creation time."""
        ours = self.body.replace(self.digest.encode(), digest.encode())
        was, now = b'"created%s":%d', created
        for suffix in (b"", b"_at"):  # a response's field ends in `_at`
            ours = ours.replace(was % (suffix, self.created), was % (suffix, now), 1)
        return ours

    def sealed(self, key: bytes) -> bytes:
        """Return the reply as a record after a checksum of the key and the record."""
        record = b"%s %d %s" % (self.digest.encode(), self.created, self.body)
        return _checksum(key, record) + record


def unsealed(key: bytes, record: object) -> Kept | None:
    """Return the reply sealed with a key; None for other bytes or another key."""
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
    """Keys of the requests to an engine with these served names, including adapters.

    Lookup and storage both use `key_of`, with the body that the engine gets. With `sampled`,
    requests with random sampling have keys too.
    """

    served_names: Sequence[str]
    sampled: bool = False

    def key_of(self, url: str, body: Mapping[str, Any], digest: str) -> bytes | None:
        """Return the key of a line's request; None if its result is not reusable.

        Equal keys mean equal prompts, constraints and parameters. Only the order of the body's own
        fields is ignored, because templates and grammars can depend on the order of all others. A
        sampled result is keyed by the line's `digest`, which also keys its randomness: each line
        has its own sample. Content at a URL may change, so a request that fetches any has no key.
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
            ignored = _WITHOUT_EFFECT - (_SHOWN if route is routes.RESPONSES else frozenset())
            pairs = [[name, fields[name]] for name in sorted(fields.keys() - ignored)]
            text = to_json([VERSION, route.name, digest if is_sampled else None, pairs])
        except (RequestError, ValueError):
            return None  # the engine refuses it
        return blake2b(text, digest_size=KEY_BYTES).digest()
