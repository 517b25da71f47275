"""`--model` is validated before any model library is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.offline.console.errors import Refused
from tidemill.offline.engine.engine import engine_config
from tidemill.offline.engine.options import EngineOptions


def test_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every spelling of a path is recognised; a possible hub ID is left to the hub."""
    monkeypatch.chdir(tmp_path)
    for name in ("./nothere", str(tmp_path / "none"), "../x", "~/models/x", "a/b/c", "models/"):
        with pytest.raises(Refused, match=f"--model {name}: folder not found"):
            engine_config(EngineOptions(model=name))
    for name in ("gpt2", "Qwen/Qwen3-0.6B", str(tmp_path)):
        assert engine_config(EngineOptions(model=name)).model == name


def test_a_gguf_file_is_a_model_where_there_is_one(tmp_path: Path) -> None:
    """However it is written, and in a folder by itself."""
    file = tmp_path / "model-Q4_K_M.GGUF"
    with pytest.raises(Refused, match=f"--model {file}: file not found"):
        engine_config(EngineOptions(model=str(file)))
    file.touch()
    for name in (str(tmp_path), str(file)):
        assert engine_config(EngineOptions(model=name)).model == name


def test_a_weights_file_is_not_a_model(tmp_path: Path) -> None:
    """Its configuration and tokenizer are next to it, in the folder."""
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(Refused, match="is a file"):
        engine_config(EngineOptions(model=str(file)))
