"""Images and recordings of a table's rows that are files next to the table."""

from __future__ import annotations

import json
from base64 import b64encode
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pyarrow import csv

from tidemill.batch.table.recipe import parse_recipe
from tidemill.offline.files import local_media
from tidemill.offline.files.local_media import with_local_media
from tidemill.offline.files.table_requests import open_requests

PNG, WEB = b"\x89PNG", "https://files.example.com/a.png"
INLINE = f"data:;base64,{b64encode(PNG).decode()}"


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> Path:
    """Return a folder with an image, next to a file outside it."""
    (tmp_path / "outside.png").write_bytes(b"secret")
    folder = tmp_path / "table"
    (folder / "images").mkdir(parents=True)
    (folder / "images/a.png").write_bytes(PNG)
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    return folder


def parts(*found: dict[str, Any]) -> dict[str, Any]:
    """Return a body with a message of these parts."""
    return {"messages": [{"role": "user", "content": [*found]}]}


def image(url: str) -> dict[str, Any]:
    """Return an image's part."""
    return {"type": "image_url", "image_url": {"url": url}}


def line_of(body: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the line of a body, with its files."""
    line = json.dumps({"custom_id": "1", "url": "/v1/x", "body": body}).encode() + b"\n"
    found = with_local_media(line, folder)
    assert found.endswith(b"\n")
    return dict(json.loads(found))


def test_every_kind_of_medium_may_be_a_file(folder: Path) -> None:
    """URLs and texts are not changed."""
    bodies = [
        lambda url: parts({"type": "text", "text": "images/a.png"}, image(url), image(WEB)),
        lambda url: parts({"type": "audio_url", "audio_url": url}),
        lambda url: parts({"type": "file", "file": {"file_url": url}, "pages": "1"}),
        lambda url: {"input": [{"content": [{"type": "input_image", "image_url": url}]}]},
        lambda url: {"questions": [], "images": [WEB, url]},
        lambda url: {"file_url": url, "language": "en"},
    ]
    for body in bodies:
        found = line_of(body("images/a.png"), folder)
        assert found == {"custom_id": "1", "url": "/v1/x", "body": body(INLINE)}
    line = json.dumps({"custom_id": "1", "body": parts(image(WEB))}).encode()
    assert with_local_media(line, folder) == line


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("../outside.png", "`../outside.png` is outside the table's folder: move it there"),
        ("link.png", "is outside the table's folder"),
        ("/etc/passwd", "is outside the table's folder"),
        ("none.png", "`none.png` does not exist: paths are relative to the table's folder"),
        ("images", "does not exist"),
        ("a\0.png", "does not exist"),
        ("a" * 300, "cannot be read: File name too long"),
        ("images/a.png", "`images/a.png` is larger than 3 bytes"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_of_its_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, words: str
) -> None:
    """No file outside the table's folder is read, by a link neither."""
    monkeypatch.setattr(local_media, "MAX_INLINE_BYTES", 3)
    found = line_of(parts(image(path)), folder)
    assert found.keys() == {"custom_id", "row_error"}
    assert words in found["row_error"]["message"]


def test_paths_of_a_table_are_relative_to_it(run: Any, folder: Path) -> None:
    """The rows of files are requests with their data, and other rows are not affected."""
    table, out = folder / "table.csv", folder / "out.csv"
    table.write_text("picture\nimages/a.png\nnone.png\n")
    keys = {"messages": [{"role": "user", "content": [image("{{ picture }}")]}]}
    with ExitStack() as stack:
        requests = open_requests(
            str(table), parse_recipe(keys), None, tmp_dir=None, max_line_bytes=2**20, stack=stack
        )
        first, second = (json.loads(raw.data) for raw in requests.lines())
    assert first["body"] == parts(image(INLINE))
    assert "`none.png` does not exist" in second["row_error"]["message"]
    part = '{type = "image_url", image_url = {url = "{{ picture }}"}}'
    reply = '{choices = [{message = {content = "hi"}, finish_reason = "stop"}]}'
    table.with_suffix(".recipe.toml").write_text(
        f'messages = [{{role = "user", content = [{part}]}}]\nparams.reply = {reply}\n'
    )
    assert run("-i", table, "-o", out, "--on-invalid-line", "skip") == 0
    errors = csv.read_csv(out).column("error").to_pylist()
    assert errors[0] in (None, "")
    assert "`none.png` does not exist" in errors[1]
