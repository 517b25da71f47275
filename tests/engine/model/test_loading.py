"""What is served and what is refused, by name and with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.families import build
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model import native
from tidemill.engine.model.loading import load_model


@pytest.mark.parametrize("content", ["", "{", '{"model_type": "no_such_type"}'])
def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path, content: str) -> None:
    """An empty, broken or unknown config says so with the folder's name."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelRefused, match=str(tmp_path)):
        load_model(EngineConfig(str(tmp_path)))


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    """A config that brings its own class is refused and its file never imported."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}}'
    )
    witness = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(witness)!r}, 'w')\nclass Config: pass\n")
    with pytest.raises(ModelRefused):
        load_model(EngineConfig(str(tmp_path)))
    assert not witness.exists()


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    """Only safetensors are read: a pickle could run code."""
    network: Any = build("LlamaConfig")
    network.config.save_pretrained(tmp_path)
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match="safetensors"):
        load_model(EngineConfig(str(tmp_path)))


def test_a_model_that_fits_no_memory_is_refused_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody else tries to load it, who would take no less."""
    build("LlamaConfig").save_pretrained(tmp_path)  # type: ignore[operator]

    def load(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(native, "load", load)
    refused = r"does not fit .*Tried to allocate 2.00 GiB.*--quantization fp8 .*--tensor-parallel"
    with pytest.raises(ModelRefused, match=refused):
        load_model(EngineConfig(str(tmp_path)))
