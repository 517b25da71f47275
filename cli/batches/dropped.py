"""How far the batch of a drop is: the bucket tells its end only, the API everything before."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cli.api.client import Client
from cli.api.server import API_KEY, BASE_URL, server_of
from cli.batches.follow import Show, batch_shown
from cli.errors import CliError
from cli.terminal import say

# Among so many of the newest the batch of a drop is looked for.
_NUM_NEWEST = 100


@contextmanager
def drop_shown(url: str, since: float) -> Iterator[Callable[[], object]]:
    """Yield what looks at the batch of an object dropped at `since` or later, and shows it.

    Nothing depends on it: it never raises, and what keeps it from looking is said once.
    """
    if not os.environ.get(BASE_URL):
        say(f"{BASE_URL} and {API_KEY}, when they are set, let it show how far the batch is")
        yield lambda: None
        return
    try:
        client = Client(server_of(None))
    except CliError as exc:
        say(f"no progress is shown: {exc}")
        yield lambda: None
        return
    with client, batch_shown() as show:
        yield _Looker(client, url, since, show).look


class _Looker:
    """Finds a batch by its input, then follows it by its id."""

    def __init__(self, client: Client, url: str, since: float, show: Show) -> None:
        self._client = client
        self._url = url
        self._since = since
        self._show = show
        self._batch_id: str | None = None
        self._is_over = False

    def look(self) -> None:
        """Show the batch as it is now, if it is there."""
        if self._is_over:
            return
        try:
            self._batch_id = self._batch_id or self._find()
            if self._batch_id is not None:
                self._show(self._client.batch(self._batch_id))
        except CliError as exc:
            say(f"no progress is shown any more: {exc}")
            self._is_over = True

    def _find(self) -> str | None:
        for batch in self._client.batches(_NUM_NEWEST):
            is_its = batch.fields.get("input_file_id") == self._url
            if is_its and batch.fields["created_at"] >= self._since and not batch.has_ended:
                return batch.id
        return None
