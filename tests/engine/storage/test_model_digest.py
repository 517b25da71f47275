"""Models share results if everything that determines the results is equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tidemill.engine.config import EngineConfig, LoraModule
from tidemill.engine.storage import model_digest
from tidemill.engine.storage.model_digest import results_digest, sampled_digest


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    """Return the config of a model with two files."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return EngineConfig(str(folder))


def digest(config: EngineConfig, template: str | None = None, created: int = 0) -> bytes:
    """Return the digest of results."""
    result = results_digest(config, template, created)
    assert result is not None
    return result


def test_files_of_the_same_bytes_are_the_same_model(config: EngineConfig, tmp_path: Path) -> None:
    """Paths and modification times do not matter; other bytes are another model."""
    before = digest(config)
    moved = Path(config.model).rename(tmp_path / "moved")
    here = replace(config, model=str(moved))
    assert digest(here) == before
    (moved / ".cache").write_text("of no account")
    assert digest(here) == before
    (moved / "model.safetensors").write_bytes(b"other!!")
    assert digest(here) != before


def test_settings_that_only_affect_speed_change_nothing(config: EngineConfig) -> None:
    """Scheduling does not affect a result; numerics do."""
    before = digest(config)
    same = replace(config, max_num_seqs=3, kv_cache_memory=10**9, admission="prefix")
    assert digest(same) == before
    others: list[Callable[[EngineConfig], EngineConfig]] = [
        lambda one: replace(one, dtype="float32"),
        lambda one: replace(one, kv_cache_dtype="fp8"),
        lambda one: replace(one, max_model_len=64),
        lambda one: replace(one, seed=1),
        lambda one: replace(one, lora_modules=(LoraModule("sql", one.model),)),
    ]
    assert before not in {digest(change(config)) for change in others}
    assert digest(config, "{{ messages }}") != before


def test_results_of_a_template_with_the_date_expire_daily(config: EngineConfig) -> None:
    """Any other template has the same results on all days."""
    day = 86_400
    assert digest(config, "{{ x }}", 0) == digest(config, "{{ x }}", day)
    telling = "{{ strftime_now('%Y') }}"
    assert digest(config, telling, 0) == digest(config, telling, day - 1)
    assert digest(config, telling, 0) != digest(config, telling, day)
    Path(config.model, "chat_template.jinja").write_text(telling)
    assert digest(config, None, 0) != digest(config, None, day)


def test_a_missing_model_has_no_digest() -> None:
    """Nothing is fetched for it."""
    assert results_digest(EngineConfig("no/such-model"), None, 0) is None


def test_a_file_is_read_again_only_after_a_change(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of many gigabytes are read once."""
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    before = digest(config)
    monkeypatch.delattr(model_digest, "file_digest")  # a file that is read fails
    assert digest(config) == before


def test_the_sampled_digest_does_not_depend_on_the_path(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small files are read fully; large ones by size, beginning and samples up to the end."""
    monkeypatch.setattr(model_digest, "_WHOLE_BYTES", 2**16)
    folder = Path(config.model)
    weights = bytearray(2**21)
    (folder / "model.safetensors").write_bytes(weights)
    before = sampled_digest(folder)
    assert before is not None
    (folder / "README.md").write_text("of no account")
    folder = folder.rename(tmp_path / "moved")
    assert sampled_digest(folder) == before
    for place in (0, 2**16 - 1, 2**20, 2**21 - 1):
        weights[place] = 1
        (folder / "model.safetensors").write_bytes(weights)
        weights[place] = 0
        assert sampled_digest(folder) != before
    (folder / "model.safetensors").write_bytes(weights)
    assert sampled_digest(folder) == before
    (folder / "config.json").write_text("[]")
    assert sampled_digest(folder) != before
    before = sampled_digest(folder)
    (folder / "sparse_linear.pt").write_bytes(b"a head of BGE-M3")
    assert sampled_digest(folder) != before
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("nowhere")
    assert sampled_digest(folder) != before
