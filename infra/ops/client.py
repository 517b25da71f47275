"""Client of a deployment's API for this project's own scripts; users use the OpenAI SDK."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx

from tidemill.net.backoff import retry

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
_POLL_SECONDS = 0.5
_RETRY_DELAYS_SECONDS = (0.5, 0.5)
_TIMEOUT_SECONDS = 35.0  # an API Gateway gives up after 30


class ApiFailed(Exception):
    """The API refused a request or could not be reached; the message contains its reply."""


class Api:
    """Calls one deployment with a key; must be closed."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(
            base_url=f"{url}/v1/",
            headers={"Authorization": f"Bearer {key}"},
            timeout=_TIMEOUT_SECONDS,
        )

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def batch(self, batch_id: str) -> dict[str, Any]:
        """Return the Batch object with this ID."""
        return self._call("GET", f"batches/{batch_id}")

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Request a batch's cancellation and return it."""
        return self._call("POST", f"batches/{batch_id}/cancel")

    def find(self, input_url: str) -> dict[str, Any] | None:
        """Return the newest batch of a dropped file among the newest hundred, or None."""
        page = self._call("GET", "batches?limit=100")
        return next((batch for batch in page["data"] if batch["input_file_id"] == input_url), None)

    def follow(
        self,
        input_url: str,
        *,
        seconds: float,
        until: Callable[[dict[str, Any]], bool] = lambda batch: batch["status"] in ENDED,
        show: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> dict[str, Any]:
        """Return the batch of a dropped file as soon as `until` is true for it.

        `show` is called with each new state. Raises ApiFailed after `seconds`.
        """
        deadline, seen = time.monotonic() + seconds, None
        while time.monotonic() < deadline:
            batch = self.batch(seen["id"]) if seen else self.find(input_url)
            if batch is not None:
                if batch != seen:
                    show(batch)
                if until(batch):
                    return batch
                seen = batch
            time.sleep(_POLL_SECONDS)
        where = f"it is {seen['status']}, {seen['request_counts']}" if seen else "no batch appeared"
        raise ApiFailed(f"{input_url}: {where} after {seconds:g} s")

    def _call(self, method: str, path: str) -> dict[str, Any]:
        delays = _RETRY_DELAYS_SECONDS if method == "GET" else ()
        try:
            response = retry(lambda: self._http.request(method, path), delays, httpx.HTTPError)
        except httpx.HTTPError as exc:
            raise ApiFailed(
                f"the API at {self._http.base_url.host} cannot be reached ({method} {path}): {exc}"
            ) from exc
        if response.is_error:
            raise ApiFailed(f"{method} {path}: {response.status_code} {response.text[:500]}")
        found: dict[str, Any] = response.json()
        return found
