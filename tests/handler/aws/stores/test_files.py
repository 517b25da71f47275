"""A tenant's files in lists, and uploads, through both drivers on each emulator."""

from __future__ import annotations

from dataclasses import replace
from uuid import uuid4

import pytest

from tests.handler.aws.conftest import Run
from tests.handler.aws.given import NOW, make_batch
from tests.handler.aws.stores.test_listing import in_small_answers
from tests.long_parameters import with_long
from tidemill.batch.stored_file import File, Upload
from tidemill.handler.aws.stores.files import Order
from tidemill.handler.deployment import Deployment


@pytest.fixture
def tenant() -> str:
    """Return a tenant without files."""
    return uuid4().hex


def make_file(tenant: str, age: int = 0, purpose: str = "batch") -> File:
    """Return a file that is not recorded yet."""
    return File(f"file-{uuid4().hex}", tenant, "k", 5, NOW - age, "n", purpose)


def add(run: Run, deployment: Deployment, tenant: str, *ages: int) -> list[File]:
    """Record files with these ages in seconds, every other a result; the newest comes first."""
    kinds = ("batch", "batch_output")
    made = [make_file(tenant, age, kinds[number % 2]) for number, age in enumerate(ages)]
    for file in made:
        run(deployment.files.put_file(file))
    return sorted(made, key=lambda file: (file.created_at, file.id), reverse=True)


@pytest.mark.parametrize(
    ("order", "purpose"),
    with_long(
        [("asc", None), ("desc", "batch")],
        [("desc", None), ("asc", "batch"), ("asc", "batch_output"), ("desc", "batch_output")],
    ),
)
def test_every_file_is_listed_once(
    run: Run, deployment: Deployment, tenant: str, order: Order, purpose: str | None
) -> None:
    """The list is by tenant and purpose, among batches, whatever DynamoDB's page size."""
    made = add(run, deployment, tenant, 5, 0, 5, 10, 3)
    add(run, deployment, f"{tenant}x", 3)
    run(deployment.table.create_batch(make_batch(deployment, tenant=tenant, created_at=NOW - 4)))
    wanted = [file for file in made if purpose in {None, file.purpose}]
    wanted = wanted[::-1] if order == "asc" else wanted
    for limit in (1, 2, len(wanted), len(wanted) + 1):
        found: list[File] = []
        after, has_more = None, True
        while has_more:
            listing = deployment.files.list_files(
                tenant, limit=limit, after=after, order=order, purpose=purpose
            )
            page, has_more = run(in_small_answers(listing))
            assert has_more is (len(found) + len(page) < len(wanted))
            assert len(page) == limit or not has_more
            found += page
            after = run(deployment.files.find_place(tenant, page[-1].id))
        assert found == wanted


def test_a_deleted_file_leaves_its_place_and_nothing_else(
    run: Run, deployment: Deployment, tenant: str
) -> None:
    """Only its own tenant could tell it from a file that never existed."""
    first, last = add(run, deployment, tenant, 0, 5)
    place = run(deployment.files.find_place(tenant, first.id))
    now = 4_000_000_000
    run(deployment.files.delete_file(first, now))
    assert run(deployment.files.get_file(first.id)) is None
    assert run(deployment.files.find_place(tenant, first.id)) == place
    assert run(deployment.files.find_place("other", first.id)) is None
    assert run(deployment.files.list_files(tenant, limit=9)) == ([last], False)
    assert run(deployment.files.list_files(tenant, limit=9, after=place)) == ([last], False)


def make_upload(tenant: str = "lab") -> Upload:
    """Return an upload that is not recorded yet."""
    return Upload(
        f"upload_{uuid4().hex}", tenant, 5, "n", "batch", NOW, NOW + 60, f"file-{uuid4().hex}"
    )


def test_what_is_settled_of_an_upload_stays(run: Run, deployment: Deployment) -> None:
    """Its way, its parts and S3's id of it: the second to say them learns of the first's."""
    upload, uploads = make_upload(), deployment.uploads
    run(uploads.create_upload(upload))
    assert run(uploads.get_upload(upload.id)) == upload
    chosen = run(uploads.choose(upload, "parts", "a", NOW + 60))
    assert chosen == replace(upload, way="parts", digest="a")
    assert run(uploads.choose(upload, "urls", "", NOW + 99)) == chosen
    noted = run(uploads.note_multipart(upload, "1"))
    assert noted == replace(chosen, multipart_id="1")
    assert run(uploads.note_multipart(upload, "2")) == noted


def test_an_upload_ends_once(run: Run, deployment: Deployment, tenant: str) -> None:
    """It ends as a file or cancelled, and later calls change nothing."""
    uploads = deployment.uploads
    kept, lost = make_upload(tenant), make_upload(tenant)
    for upload in (kept, lost):
        run(uploads.create_upload(upload))
    file, never = make_file(tenant), make_file(tenant)
    completed = run(uploads.complete_upload(kept, file))
    assert completed == replace(kept, status="completed")
    assert run(uploads.cancel_upload(kept)) == completed
    cancelled = run(uploads.cancel_upload(lost))
    assert cancelled == replace(lost, status="cancelled")
    assert run(uploads.complete_upload(lost, never)) == cancelled
    for ended in (completed, cancelled):
        assert run(uploads.choose(ended, "urls", "", NOW)) == ended
        assert run(uploads.note_multipart(ended, "1")) == ended
    assert run(deployment.files.list_files(tenant, limit=9)) == ([file], False)
