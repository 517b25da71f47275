"""Hears of the end of batches: OPENAI_WEBHOOK_SECRET=whsec_… python examples/webhook.py [PORT].

Tidemill speaks https to public hosts only: let your proxy or tunnel hand its requests to this.
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from openai import InvalidWebhookSignatureError, OpenAI

client = OpenAI(api_key="not needed here")
heard: set[str] = set()


class Receiver(BaseHTTPRequestHandler):
    """Answers 204 to events that are signed with the secret, and 400 to all else."""

    def do_POST(self) -> None:
        """Print what has ended, once for each event."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            event = client.webhooks.unwrap(body, dict(self.headers.items()))
        except (InvalidWebhookSignatureError, ValueError):
            self.send_error(400)
            return
        # Answer first: what takes long is no reason to be told again.
        self.send_response(204)
        self.end_headers()
        if event.id not in heard:
            heard.add(event.id)
            print(event.type, event.data.id, flush=True)


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8080
    ThreadingHTTPServer(("127.0.0.1", port), Receiver).serve_forever()
