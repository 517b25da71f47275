"""A check that passed is not repeated, until anything that it depends on changes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.families import build
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import ModelRefused
from tidemill.engine.model import native
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.native import ParityResult
from tidemill.engine.model.network.decoder import Decoder
from tidemill.engine.model.network.loaded_model import LoadedModel
from tidemill.engine.model.parity import parity_inputs
from tidemill.engine.model.parity.logits import chunked_logits, parity_tokens
from tidemill.engine.model.weights.checkpoint import WHOLE

Loads = Callable[..., LoadedModel]


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a tiny Qwen3, without cached results."""
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    build("Qwen3Config").save_pretrained(tmp_path / "model")  # type: ignore[operator]
    return tmp_path / "model"


@pytest.fixture(name="proofs")
def fixture_proofs(monkeypatch: pytest.MonkeyPatch) -> list[ParityResult]:
    """Return the list of checks that run from now on."""
    made: list[ParityResult] = []
    check = native.check_parity

    def counted(*parts: Any, **others: Any) -> ParityResult:
        made.append(check(*parts, **others))
        return made[-1]

    monkeypatch.setattr(native, "check_parity", counted)
    return made


def load(folder: Path, dtype: Any = "float32") -> LoadedModel:
    """Load a folder's model on the CPU."""
    return load_model(EngineConfig(str(folder), dtype=dtype, device="cpu"))


def test_a_second_load_proves_nothing_and_answers_the_same(
    folder: Path, proofs: list[ParityResult]
) -> None:
    """It is the decoder that was proved."""
    cold, warm = load(folder), load(folder)
    assert len(proofs) == 1
    assert isinstance(warm.network, Decoder)
    tokens = parity_tokens(cold.vocab_size, ())
    assert torch.equal(chunked_logits(cold, tokens), chunked_logits(warm, tokens))


def reconfigured(folder: Path) -> None:
    """Add a field without effect to a config."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"top_k": 3}))


def rewritten(folder: Path) -> None:
    """Write the weights again, with the same bytes."""
    path = folder / WHOLE
    path.write_bytes(path.read_bytes())
    later = path.stat().st_mtime_ns + 1_000_000
    os.utime(path, ns=(later, later))


@pytest.mark.parametrize("change", [reconfigured, rewritten])
def test_a_change_of_its_files_is_noticed(
    folder: Path, proofs: list[ParityResult], change: Callable[[Path], None]
) -> None:
    """The config counts by its bytes, the weights by the time and size of their last write."""
    load(folder)
    change(folder)
    load(folder)
    assert len(proofs) == 2


def test_another_dtype_processor_or_version_repeats_the_check(
    folder: Path, proofs: list[ParityResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them may compute different results."""
    load(folder)
    load(folder, "bfloat16")
    assert len(proofs) == 2
    monkeypatch.setattr("tidemill.engine.model.parity_cache.package_versions", lambda *_: "torch=9")
    load(folder)
    assert len(proofs) == 3
    monkeypatch.setattr("tidemill.engine.model.parity_cache._processor", lambda _: "another")
    load(folder)
    assert len(proofs) == 4


def test_a_proof_that_does_not_hold_is_not_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers runs the model, and ours gets its chance in each load."""
    wrong = ParityResult(holds=False, distance=1.0, num_layers=None)
    monkeypatch.setattr(native, "check_parity", lambda *_, **__: wrong)
    assert not isinstance(load(folder).network, Decoder)
    monkeypatch.setattr(native, "check_parity", lambda *_, **__: replace(wrong, holds=True))
    assert isinstance(load(folder).network, Decoder)


def test_a_snapshots_proof_holds_on_every_machine(folder: Path, proofs: list[ParityResult]) -> None:
    """Its files are written at another time there; another snapshot is another model."""
    for revision in ("a" * 40, "b" * 40):
        for machine in ("here", "there"):
            own = folder.parent / machine / "snapshots" / revision
            shutil.copytree(folder, own, copy_function=shutil.copyfile)
            os.utime(own / WHOLE, (1, len(machine)))
            load(own)
    assert len(proofs) == 2


def test_a_partial_comparison_is_noted_each_time(
    folder: Path, proofs: list[ParityResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the same proof, and so the same note."""
    monkeypatch.setattr(parity_inputs, "MOST_BYTES", 1000)
    cold, warm = load(folder, "bfloat16"), load(folder, "bfloat16")
    assert len(proofs) == 1
    assert "the first 2 of 4 layers" in warm.notes[0]
    assert warm.notes == cold.notes


def test_damaged_weights_are_refused_whatever_is_remembered(
    folder: Path, proofs: list[ParityResult]
) -> None:
    """A disk may change numbers in a file that was not written."""
    load(folder)
    path = folder / WHOLE
    before, data = path.stat(), bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start:] = np.full((len(data) - start) // 4, np.nan, "<f4").tobytes()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ModelRefused, match="NaN or infinity"):
        load(folder)
    assert len(proofs) == 1
