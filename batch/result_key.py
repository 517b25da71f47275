"""Result key: what makes two requests the same one, so that a result of one is the other's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from tidemill.protocol import routes
from tidemill.protocol.errors import ProtocolError
from tidemill.protocol.prompt_key import is_determined

KEY_BYTES: Final = 16
MAX_BYTES: Final = 16 * 2**30
"""What kept results take at most, unless a user says otherwise."""

_WITHOUT_EFFECT: Final = frozenset({"user", "metadata", "safety_identifier"})
"""Parameters of a body that no reply depends on."""

_DETERMINED: Final = (
    routes.EMBEDDINGS,
    routes.SCORE,
    routes.RERANK,
    routes.GENERATIVE_SCORING,
)
"""Routes whose replies are the same whenever they are computed."""

_FETCHED: Final = ('"url":"http', '"file":"http')
"""What lies behind an address may be another by then."""


class CacheError(ProtocolError):
    """A store of results that cannot be read or written; the message says why."""

    code = "result_cache"


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


def result_key(url: str, body: Mapping[str, Any], *, sampled: bool = False) -> bytes | None:
    """Return the key of a request; None where another run may give another result.

    Those of temperature 0 or with a seed are determined, as vectors and scores are, but for what is
    fetched from the web; `sampled` gives all others a key, too.
    """
    route = routes.find_route(url)
    if route is None or not (sampled or route in _DETERMINED or is_determined(body)):
        return None
    told = {name: value for name, value in body.items() if name not in _WITHOUT_EFFECT}
    text = json.dumps([route.name, told], sort_keys=True, separators=(",", ":"))
    if not sampled and any(fetched in text for fetched in _FETCHED):
        return None
    return blake2b(text.encode(errors="surrogatepass"), digest_size=KEY_BYTES).digest()
