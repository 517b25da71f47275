"""Unpacked GGUF files: created once per version of a file and found by every kind of name."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from tests.engine.families import build
from tests.engine.gguf_files import write_gguf
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model.endpoint_names import endpoints_of
from tidemill.engine.storage.gguf import safetensors_writer, unpacked
from tidemill.engine.storage.gguf.unpacked import description_folder, unpack_weights
from tidemill.engine.storage.hub import (
    check_hub,
    find_file,
    find_folder,
    local_source,
    snapshot_commit,
)
from tidemill.engine.storage.model_digest import results_digest, sampled_digest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of unpacked files."""
    monkeypatch.setenv("TIDEMILL_WEIGHTS_CACHE", str(tmp_path / "weights"))
    return tmp_path / "weights" / "gguf"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the bytes of a whole file."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(file, build("LlamaConfig")).read_bytes()


@pytest.fixture
def file(tmp_path: Path, tiny: bytes) -> Path:
    """Return a GGUF file in a new folder."""
    path = tmp_path / "model" / "Tiny Model.gguf"
    path.parent.mkdir()
    path.write_bytes(tiny)
    return path


def test_a_file_is_unpacked_once_until_it_is_written_again(file: Path, cache: Path) -> None:
    """A log line describes the work; reading the description alone creates no weights."""
    folder = description_folder(file)
    assert folder.parent == cache
    assert folder.name.startswith("Tiny-Model-")
    assert not (folder / "model.safetensors").exists()
    same, note = unpack_weights(file)
    assert same == folder
    assert note is not None
    assert note.startswith("dequantized 0.00 GB of GGUF to 0.00 GB of weights in ")
    assert note.endswith(f" s, stored in {folder}")
    assert unpack_weights(file) == (folder, None)
    assert not [path for path in folder.iterdir() if path.name.startswith(".partial")]
    os.utime(file, (1, 1))
    assert description_folder(file) != folder


def test_two_at_once_dequantize_a_file_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process waits for the first."""
    calls = Counter[str]()
    write = safetensors_writer.write_safetensors

    def counted(*arguments: object) -> None:
        calls["writes"] += 1
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(safetensors_writer, "write_safetensors", counted)
    with ThreadPoolExecutor(2) as pool:
        folders = {folder for folder, _ in pool.map(unpack_weights, [file, file])}
    assert (calls["writes"], len(folders)) == (1, 1)


def test_leftovers_of_a_killed_process_are_replaced(file: Path) -> None:
    """Only a complete file has the final name."""
    folder = description_folder(file)
    (folder / ".partial-model.safetensors").write_bytes(b"half")
    unpack_weights(file)
    assert not (folder / ".partial-model.safetensors").exists()
    (folder / "config.json").unlink()
    assert (description_folder(file) / "config.json").exists()


def test_a_full_disk_and_an_unusable_cache_are_reported(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to do."""
    description_folder(file)
    full = SimpleNamespace(free=10)
    monkeypatch.setattr(unpacked.shutil, "disk_usage", lambda _: full)
    with pytest.raises(ModelRefused, match=r"weights need .* on disk, and .* has 0.0 GB free"):
        unpack_weights(file)
    shutil.rmtree(cache)
    cache.write_text("a file where the folder would be")
    with pytest.raises(ModelRefused, match=r"cannot be unpacked into .*: Not a directory"):
        description_folder(file)


def test_folders_unused_for_a_long_time_are_removed(file: Path, cache: Path) -> None:
    """They are removed when another one is created."""
    old, recent = cache / "old-1", cache / "recent-1"
    for folder in (old, recent):
        folder.mkdir(parents=True)
    os.utime(old, (1, 1))
    description_folder(file)
    assert (old.exists(), recent.exists()) == (False, True)


def test_a_file_is_identified_by_its_contents(file: Path, tmp_path: Path) -> None:
    """Its bytes decide, not its name, its folder or the unpacked files."""
    source = local_source(str(file))
    assert source == file == local_source(str(file.parent))
    digest = sampled_digest(file)
    assert digest is not None
    moved = tmp_path / "moved.gguf"
    shutil.copy(file, moved)
    assert sampled_digest(moved) == digest
    config = EngineConfig(str(file))
    results = results_digest(config, None, 0)
    assert results == results_digest(EngineConfig(str(moved)), None, 0)
    assert results == results_digest(EngineConfig(str(file.parent)), None, 0)
    data = bytearray(moved.read_bytes())
    data[-1] ^= 1
    moved.write_bytes(data)
    assert sampled_digest(moved) != digest
    assert results_digest(EngineConfig(str(moved)), None, 0) != results


def test_the_endpoints_of_a_file_are_known_before_its_weights_are_unpacked(
    file: Path, cache: Path
) -> None:
    """They are those for text, or for vectors if the settings ask for them."""
    names = endpoints_of(EngineConfig(str(file)))
    assert names == endpoints_of(EngineConfig(str(file.parent)))
    assert names is not None
    assert "/v1/chat/completions" in names
    vectors = endpoints_of(EngineConfig(str(file), runner="pooling", convert="embed"))
    assert vectors is not None
    assert "/v1/embeddings" in vectors
    assert not list(cache.glob("*/model.safetensors"))
    file.write_bytes(b"not a model")
    assert endpoints_of(EngineConfig(str(file))) is None
    assert check_hub([str(file), str(file.parent)]) is None


@pytest.fixture
def hub(tmp_path: Path, tiny: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """Be a hub of the model `org/tiny`; return its files by name."""
    files = {"README.md": b"#", "tiny-Q8_0.gguf": tiny, "mmproj-tiny.gguf": b"GGUF"}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(has_body=False)

        def do_GET(self) -> None:
            self.answer(has_body=True)

        def answer(self, *, has_body: bool) -> None:
            name = self.path.rpartition("/")[2]
            body = files.get(name)
            if "/api/models/" in self.path:
                siblings = [{"rfilename": name} for name in files]
                body = json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode()
            self.send_response(404 if body is None else 200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{name}"')
            if body is None:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            if has_body and body is not None:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield files
        server.shutdown()


def test_a_hub_id_of_one_gguf_file_is_fetched(hub: dict[str, bytes]) -> None:
    """It is identified by its bytes and the hub's commit, and found later without the hub."""
    assert local_source("org/tiny") is None
    folder = find_folder("org/tiny")
    assert folder is not None
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    source = local_source("org/tiny")
    assert source is not None
    assert source.read_bytes() == hub["tiny-Q8_0.gguf"]
    assert snapshot_commit(source) == COMMIT
    hub.clear()
    assert find_file("org/tiny", "config.json") == folder / "config.json"
    assert find_file("org/tiny", "none.json") is None


def test_a_hub_id_of_several_gguf_files_is_refused(hub: dict[str, bytes]) -> None:
    """The error lists their names; a model in another format is not fetched."""
    hub["tiny-Q4_0.gguf"] = b"GGUF"
    with pytest.raises(ModelRefused, match=r"org/tiny has 2 GGUF files \(tiny-Q4_0.gguf, tiny-Q8"):
        find_folder("org/tiny")
    for name in [name for name in hub if name.endswith(".gguf")]:
        del hub[name]
    assert find_folder("org/tiny") is None
