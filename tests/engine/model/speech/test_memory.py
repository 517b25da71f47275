"""The number of windows that run at once: limited by the request, then by memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.speech_models import save
from tidemill.engine.config import EngineConfig
from tidemill.engine.errors import OutOfCacheMemory
from tidemill.engine.model.speech.loading import LoadedSpeech, count_slots, load_speech
from tidemill.engine.model.speech.runner import slot_pages

pytestmark = pytest.mark.usefixtures("proved")


@pytest.fixture(name="settings")
def fixture_settings(tmp_path: Path) -> EngineConfig:
    """Return settings of a tiny model."""
    save(tmp_path, "English alone")
    return EngineConfig(str(tmp_path), device="cpu", max_num_seqs=7)


def bytes_of(loaded: LoadedSpeech) -> int:
    """Return the bytes of a window and its text."""
    return slot_pages(loaded.architecture, loaded.backend, loaded.dtype).num_bytes


def test_at_most_the_requested_windows_run(settings: EngineConfig) -> None:
    """However much memory there is."""
    assert count_slots(load_speech(settings), settings) == 7


def test_fewer_run_where_no_more_fit(settings: EngineConfig) -> None:
    """Each window allocates the whole cache of its text at the start."""
    loaded = load_speech(settings)
    room = 3 * bytes_of(loaded) + 1
    assert count_slots(loaded, replace(settings, kv_cache_memory=room)) == 3


def test_the_error_of_no_room_contains_the_size(settings: EngineConfig) -> None:
    """The error comes before any request waits."""
    loaded = load_speech(settings)
    with pytest.raises(OutOfCacheMemory, match=f"needs {bytes_of(loaded):,} bytes"):
        count_slots(loaded, replace(settings, kv_cache_memory=bytes_of(loaded) - 1))
