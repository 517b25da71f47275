"""The hub of models: an unreachable one is reported immediately, with the cause."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

from tidemill.engine.errors import ModelRefused
from tidemill.engine.storage.hub import check_hub, child_environment, local_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Allow access to the hub, and create a cache with `org/cached`."""
    repository = tmp_path / "hub/models--org--cached"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Be a hub that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        yield server


@pytest.fixture
def closed(listening: socket.socket) -> None:
    """Be a port without a listener."""
    listening.close()


@pytest.mark.usefixtures("closed")
def test_an_unreachable_hub_is_reported_with_the_cause() -> None:
    """For a model that is not stored locally, the error also says what to do."""
    with pytest.raises(ModelRefused) as refused:
        check_hub(["org/cached", "org/other"])
    assert str(refused.value) == (
        "org/other is neither a local folder nor in the hub's cache, and the hub at "
        f"{constants.ENDPOINT} cannot be reached ([Errno 111] Connection refused): set "
        "HTTPS_PROXY for a proxy or HF_ENDPOINT for a mirror. You can also pass the path of a "
        "folder copied from another machine"
    )


@pytest.mark.usefixtures("listening")
def test_an_unresponsive_hub_is_waited_for_once() -> None:
    """The wait is not repeated for each file."""
    with pytest.raises(ModelRefused, match=r"cannot be reached \(no response within 0.1 s\)"):
        check_hub(["org/other"], seconds=0.1)


@pytest.mark.usefixtures("closed")
def test_a_model_in_the_cache_runs_without_the_hub() -> None:
    """A note is logged; nothing contacts the hub again, including processes of other ranks."""
    note = check_hub(["org/cached"])
    assert note is not None
    assert note.endswith(" Connection refused): org/cached is loaded from the cache")
    assert constants.HF_HUB_OFFLINE
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    assert child_environment()["HF_HUB_OFFLINE"] == "1"


def test_a_responsive_hub_logs_nothing(listening: socket.socket) -> None:
    """It holds for any response; errors about a model are reported elsewhere."""

    def refuse() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65_536)
            connection.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")

    thread = Thread(target=refuse)
    thread.start()
    assert check_hub(["org/other"]) is None
    thread.join()
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.usefixtures("closed")
def test_folders_and_urls_need_no_hub(tmp_path: Path) -> None:
    """The hub is not contacted for them."""
    assert check_hub([str(tmp_path), "s3://bucket/model"]) is None


@pytest.mark.parametrize("path", ["/no/such", "./model", "a/b/c", "~/model", "C:\\model"])
def test_a_path_without_a_model_is_not_looked_up_on_the_hub(path: str) -> None:
    """No hub ID is written like it."""
    with pytest.raises(ModelRefused, match=r"does not exist: pass the path of a folder or GGUF"):
        check_hub([path])
    with pytest.raises(ModelRefused, match="is not a folder"):
        check_hub([__file__])


def test_offline_mode_is_named_when_a_model_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a cached model there is no message."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert check_hub(["org/cached"]) is None
    with pytest.raises(ModelRefused, match="and HF_HUB_OFFLINE prevents a download"):
        check_hub(["org/other"])


@pytest.mark.parametrize("name", ["org/other", "no id", "a/b/c", "", "x" * 5000])
def test_a_model_that_is_not_stored_locally_has_no_folder(name: str, tmp_path: Path) -> None:
    """The hub is not contacted for it."""
    assert local_folder(name) is None
    assert local_folder(str(tmp_path)) == tmp_path
    snapshot = local_folder("org/cached")
    assert snapshot is not None
    assert snapshot.name == COMMIT
