"""Views of a deployment and of a server on one machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.batch.test_states import NEW
from tidemill.batch.batch_object import batch_object
from tidemill.batch.file.formats import FileFormat
from tidemill.batch.model import Conversion
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status
from tidemill.dashboard import pages
from tidemill.protocol.names import ANY_MODEL
from tidemill.protocol.routes import ENDPOINTS


def test_the_form_names_models_and_files() -> None:
    """A server may accept any model, and runs no tables."""
    names = "<code>a</code>, <code>b</code>"
    assert f"{names}." in pages.form(["a", "b"])
    assert f"{names}, or any other name." in pages.form(["a", ANY_MODEL, "b"])
    assert "requests, or a table<" in pages.form(["a"])
    assert "requests<" in pages.form(["a"], runs_tables=False)


def test_only_batches_of_generated_text_have_tokens() -> None:
    """All other endpoints return numbers or labels."""
    batches = [batch_object(replace(NEW, endpoint=url), Progress(), now=0) for url in ENDPOINTS]
    rows = [pages.row_of(batch, {}) for batch in batches]
    assert {row.wire.endpoint for row in rows if row.writes_tokens} == {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses"),
        *("/v1/audio/transcriptions", "/v1/audio/translations"),
    }


@pytest.mark.parametrize("auth", ["keys", "iam", "none"])
def test_only_a_page_with_keys_has_a_sign_in_form(auth: str) -> None:
    """Signed requests are explained instead; a server without keys needs nothing."""
    page = pages.page(auth)
    for words in ('id="sign-in-form"', 'id="sign-out"', "tidemill keys create"):
        assert (words in page) == (auth == "keys")


@pytest.mark.parametrize(
    ("prefix", "words"), [(None, "Upload a file here."), ("", "belong to"), ("a/", "or drop one")]
)
def test_only_a_deployment_has_a_bucket_and_costs(prefix: str | None, words: str) -> None:
    """A server of one machine has neither."""
    site = pages.Site(None if prefix is None else "USD")
    page = pages.batches(site, [], pages.Search("", "", None, 0, None), drop_prefix=prefix)
    assert words in page
    assert ('id="month"' in page) == (prefix is not None)


@pytest.mark.parametrize("table", [None, "file-table"])
def test_a_table_that_was_never_written_is_mentioned(table: str | None) -> None:
    """Rows of a batch that was cancelled do not have the columns of its input."""
    conversion = Conversion(FileFormat(is_table=True), "upload", recipe="{}")
    changes = {"conversion": conversion, "table_file_id": table, "final": Progress(1)}
    batch = replace(NEW, status=Status.CANCELLED, **changes)
    row = pages.row_of(batch_object(batch, Progress(), now=0), {})
    assert ("It has no table:" in pages.batch(pages.Site("USD"), row)) == (table is None)
