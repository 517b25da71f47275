"""Receive webhooks: OPENAI_WEBHOOK_SECRET=whsec_… python examples/webhook.py [PORT].

Tidemill calls only https URLs of public hosts: forward its requests here with a proxy or tunnel.
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from openai import InvalidWebhookSignatureError, OpenAI

client = OpenAI(api_key="not needed here")
seen: set[str] = set()


class Receiver(BaseHTTPRequestHandler):
    """Responds with 204 to events that are signed with the secret, otherwise with 400."""

    def do_POST(self) -> None:
        """Print the batch that has ended, once per event."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            event = client.webhooks.unwrap(body, dict(self.headers.items()))
        except (InvalidWebhookSignatureError, ValueError):
            self.send_error(400)
            return
        # Respond first, so that slow processing does not cause a redelivery.
        self.send_response(204)
        self.end_headers()
        if event.id not in seen:
            seen.add(event.id)
            print(event.type, event.data.id, flush=True)


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8080
    ThreadingHTTPServer(("127.0.0.1", port), Receiver).serve_forever()
