"""Listening: at a port, with a certificate, or at a Unix socket."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import trustme

from tests.server.rig import site


async def test_a_certificate_enables_https(tmp_path: Path) -> None:
    """Streams work too, and plain HTTP does not."""
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    key, chain = tmp_path / "key", tmp_path / "chain"
    certificate.private_key_pem.write_to_path(key)
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    context = ssl.create_default_context()
    authority.configure_trust(context)
    async with site(ssl_keyfile=key, ssl_certfile=chain) as place:
        assert place.url.startswith("https://")
        url = f"https://localhost:{place.port}"
        async with httpx.AsyncClient(base_url=url, verify=context) as client:
            answer = await client.post("/v1/completions", json={"stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")


async def test_a_unix_socket_replaces_a_port(tmp_path: Path) -> None:
    """The printed address names the socket."""
    path = tmp_path / "s"
    async with site(uds=str(path)) as place:
        assert place.url == f"unix:{path}"
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            assert (await client.get("/health")).status_code == 200
