"""Users' tokens: which are accepted, with generated keys, and when the issuer is contacted."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import jwt
import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tidemill.handler.settings import Oidc
from tidemill.handler.tenants.oidc import (
    RETRY_SECONDS,
    IssuerUnavailable,
    Person,
    TokenRefused,
    TokenVerifier,
    fetch_json,
    is_token,
)

ISSUER = "https://login.example.com/team"
KEYS_URL = "https://login.example.com/keys"
SETTINGS = Oidc(ISSUER, "tidemill", "department")
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
OTHER_KEY = ec.generate_private_key(ec.SECP256R1())
Changes = dict[str, Any]


class Issuer:
    """Publishes keys by their ids, and counts how often they are fetched; it may be down."""

    def __init__(self, **keys: Any) -> None:
        self.keys = keys
        self.num_fetches = 0
        self.is_down = False
        self.name = ISSUER

    def fetch(self, url: str) -> Any:
        """Answer as its two addresses do."""
        if self.is_down:
            raise OSError("timed out")
        if url == f"{ISSUER}/.well-known/openid-configuration":
            return {"issuer": self.name, "jwks_uri": KEYS_URL}
        assert url == KEYS_URL
        self.num_fetches += 1
        return {"keys": [published(key, key_id) for key_id, key in self.keys.items()]}


def published(key: Any, key_id: str) -> dict[str, Any]:
    """Return a public key as an issuer publishes it."""
    kind = jwt.algorithms.RSAAlgorithm if key is RSA_KEY else jwt.algorithms.ECAlgorithm
    made: dict[str, Any] = json.loads(kind.to_jwk(key.public_key()))
    return made | {"kid": key_id, "use": "sig"}


def token(key: Any = EC_KEY, kid: str | None = "one", alg: str = "ES256", **changes: Any) -> str:
    """Return a signed token, valid except for the changes; None removes a claim."""
    now = int(time.time())
    claims = {"iss": ISSUER, "aud": "tidemill", "sub": "u-1", "department": "search"}
    claims |= {"exp": now + 600, "nbf": now, "iat": now} | changes
    claims = {name: value for name, value in claims.items() if value is not None}
    return jwt.encode(claims, key, algorithm=alg, headers={"kid": kid} if kid else {})


@pytest.fixture
def issuer() -> Issuer:
    """Return an issuer with one key."""
    return Issuer(one=EC_KEY)


@pytest.fixture
def verify(issuer: Issuer) -> Callable[..., Person]:
    """Return a verifier's method, with a separate clock."""
    verifier = TokenVerifier(SETTINGS, issuer.fetch)

    def call(given: str, now: float = 0.0) -> Person:
        return verifier.verify(given, now)

    return call


def test_a_token_names_its_tenant(issuer: Issuer, verify: Callable[..., Person]) -> None:
    """Keys of both kinds work, for one audience among others; keys are fetched once."""
    issuer.keys["two"] = RSA_KEY
    assert verify(token()) == Person("search", "u-1")
    assert verify(token(RSA_KEY, "two", "RS256", aud=["x", "tidemill"])).tenant == "search"
    assert issuer.num_fetches == 1


NOW = int(time.time())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"exp": NOW - 120}, "it has expired"),
        ({"nbf": NOW + 86_400}, "it is not valid yet"),
        ({"aud": "another"}, "it is for another audience"),
        ({"iss": "https://login.example.com"}, "it is from another issuer"),
        ({"sub": None}, "it lacks one of exp, iss, aud and sub"),
        ({"exp": None}, "it lacks one of exp, iss, aud and sub"),
        ({"department": None}, "claim `department` does not name a tenant"),
        ({"department": "a/b"}, "claim `department` does not name a tenant"),
        ({"department": ["search"]}, "claim `department` does not name a tenant"),
        ({"department": 7}, "claim `department` does not name a tenant"),
        ({"department": True}, "claim `department` does not name a tenant"),
        ({"key": OTHER_KEY}, "it is malformed, or its signature is wrong"),
        ({"kid": None}, "not signed by a named key with RS256 or ES256"),
        ({"kid": "none"}, "signed by a key that its issuer does not publish"),
        ({"key": "s" * 32, "alg": "HS256"}, "not signed by a named key with RS256 or ES256"),
        ({"key": RSA_KEY, "alg": "RS256"}, "it is malformed, or its signature is wrong"),
        ({"key": None, "alg": "none"}, "not signed by a named key with RS256 or ES256"),
    ],
)
def test_a_token_is_refused(verify: Callable[..., Person], changes: Changes, words: str) -> None:
    """The error has the reason, and no part of the token."""
    given = token(**changes)
    with pytest.raises(TokenRefused) as refused:
        verify(given)
    assert words in refused.value.message
    assert given[:20] not in refused.value.message


def test_a_claim_that_is_null_names_no_tenant(verify: Callable[..., Person]) -> None:
    """No tenant is called `None` either."""
    claims = jwt.decode(token(), options={"verify_signature": False}) | {"department": None}
    given = jwt.encode(claims, EC_KEY, algorithm="ES256", headers={"kid": "one"})
    with pytest.raises(TokenRefused, match="does not name a tenant"):
        verify(given)


@pytest.mark.parametrize("given", ["a.b.c", "..", "e30.e30.e30", "é.é.é", "\ud800.b.c"])
def test_a_malformed_token_is_refused(verify: Callable[..., Person], given: str) -> None:
    """It is refused before the issuer is contacted."""
    assert is_token(given)
    with pytest.raises(TokenRefused):
        verify(given)


def test_a_key_that_is_new_is_fetched(issuer: Issuer, verify: Callable[..., Person]) -> None:
    """Unknown keys are fetched once a minute; a withdrawn key is valid for an hour."""
    verify(token())
    issuer.keys = {"two": OTHER_KEY}
    new = token(OTHER_KEY, "two")
    with pytest.raises(TokenRefused):
        verify(new, 59)
    assert verify(new, 60).tenant == "search"
    assert issuer.num_fetches == 2
    with pytest.raises(TokenRefused):
        verify(token(), 61)
    assert issuer.num_fetches == 2
    issuer.keys = {"one": EC_KEY}
    assert verify(new, 60 + 3599).tenant == "search"
    with pytest.raises(TokenRefused):
        verify(new, 60 + 3600)


def test_tokens_are_accepted_while_the_issuer_is_down(
    issuer: Issuer, verify: Callable[..., Person]
) -> None:
    """Known keys stay valid for a day; without them, the issuer is tried again after seconds."""
    issuer.is_down = True
    with pytest.raises(IssuerUnavailable):
        verify(token())
    issuer.is_down = False
    with pytest.raises(IssuerUnavailable):
        verify(token(), RETRY_SECONDS - 1)
    assert verify(token(), RETRY_SECONDS).tenant == "search"
    issuer.is_down = True
    assert verify(token(), RETRY_SECONDS + 86399).tenant == "search"
    with pytest.raises(IssuerUnavailable):
        verify(token(), RETRY_SECONDS + 86400)


def test_an_issuer_must_be_who_was_meant(issuer: Issuer, verify: Callable[..., Person]) -> None:
    """Else another's keys would be taken for its own."""
    issuer.name = "https://login.example.com/others"
    with pytest.raises(IssuerUnavailable):
        verify(token())


def test_keys_that_sign_nothing_are_left_out(issuer: Issuer) -> None:
    """Keys of other kinds, uses and curves, and broken ones, are skipped: the rest are accepted."""
    others = [
        {"kty": "OKP", "crv": "Ed25519", "x": "AA", "kid": "a"},
        {"kty": "EC", "crv": "P-9", "x": "AA", "y": "AA", "kid": "b"},
        {"kty": "RSA", "n": "?", "e": "?", "kid": "c"},
        published(EC_KEY, "d") | {"use": "enc"},
    ]
    fetch = issuer.fetch

    def more(url: str) -> Any:
        found = fetch(url)
        return found | ({"keys": others + found["keys"]} if "keys" in found else {})

    verifier = TokenVerifier(SETTINGS, more)
    assert verifier.verify(token(), 0).tenant == "search"
    with pytest.raises(TokenRefused):
        verifier.verify(token(kid="d"), 0)


class Pages(BaseHTTPRequestHandler):
    """A site with keys, one page that is too large, one that has moved, and one that is none."""

    def do_GET(self) -> None:
        """Answer one request."""
        if self.path == "/broken":
            self.wfile.write(b"no HTTP\r\n\r\n")
            return
        self.send_response(302 if self.path == "/moved" else 200)
        self.send_header("location", "/keys")
        self.end_headers()
        self.wfile.write(b'{"keys": []}'.ljust(300_000 if self.path == "/large" else 0))

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Serve those pages by TLS and yield their address; its authority is trusted."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("no_proxy", "localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"https://localhost:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_keys_are_fetched_by_tls_alone(site: str) -> None:
    """They come only from the issuer's URL, within a size limit; failures raise known errors."""
    assert fetch_json(f"{site}/keys") == {"keys": []}
    with pytest.raises(ValueError, match="https"):
        fetch_json(f"{site}/keys".replace("https", "http"))
    with pytest.raises(ValueError, match="262,144 bytes"):
        fetch_json(f"{site}/large")
    with pytest.raises(OSError, match="BadStatusLine"):
        fetch_json(f"{site}/broken")
    with pytest.raises(OSError, match="302"):
        fetch_json(f"{site}/moved")
    with pytest.raises(OSError, match="refused"):
        fetch_json("https://localhost:1/keys")
