"""Progress of a drop's batch, from the API: the bucket shows only its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tidemill.offline.console.errors import CliError
from tidemill.offline.console.terminal import log

from ..api.client import Client
from ..api.server import API_KEY, BASE_URL, server_of
from .follow import Show, batch_progress

# The batch of a drop is searched among this many of the newest.
_NUM_NEWEST = 100


@contextmanager
def drop_progress(url: str, since: float) -> Iterator[Callable[[], object]]:
    """Yield a function that shows the batch of an object dropped at `since` or later.

    Best effort: it never raises, and logs once why no progress is shown.
    """
    if not os.environ.get(BASE_URL):
        log(f"{BASE_URL} and {API_KEY}, when they are set, let it show how far the batch is")
        yield lambda: None
        return
    try:
        client = Client(server_of(None))
    except CliError as exc:
        log(f"no progress is shown: {exc}")
        yield lambda: None
        return
    with client, batch_progress() as show:
        yield _DropTracker(client, url, since, show).update


class _DropTracker:
    """Finds a batch by its input url, then polls it by id."""

    def __init__(self, client: Client, url: str, since: float, show: Show) -> None:
        self._client = client
        self._url = url
        self._since = since
        self._show = show
        self._batch_id: str | None = None
        self._is_over = False

    def update(self) -> None:
        """Poll the batch and show it, if it exists."""
        if self._is_over:
            return
        try:
            self._batch_id = self._batch_id or self._find()
            if self._batch_id is not None:
                self._show(self._client.batch(self._batch_id))
        except CliError as exc:
            log(f"no progress is shown any more: {exc}")
            self._is_over = True

    def _find(self) -> str | None:
        for batch in self._client.batches(_NUM_NEWEST):
            is_its = batch.fields.get("input_file_id") == self._url
            if is_its and batch.fields["created_at"] >= self._since and not batch.has_ended:
                return batch.id
        return None
