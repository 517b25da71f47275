"""How many windows are written at a time: as many as were asked for, or as fit the memory."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.errors import OutOfCacheMemory
from engine.kernels.step import MAX_SLOTS
from engine.model.memory import SHARE_OF_FREE, free_bytes
from engine.model.placement import step_limits
from engine.model.speech.loading import LoadedSpeech
from engine.model.speech.runner import WINDOWS_AT_ONCE, slot_pages


def count_slots(loaded: LoadedSpeech, settings: EngineConfig) -> int:
    """Return how many windows have room for what their texts attend to.

    Raises `OutOfCacheMemory` when there is room for none.
    """
    pages = slot_pages(loaded.architecture, loaded.backend, loaded.dtype)
    budget = settings.kv_cache_memory
    if budget is None:
        free = free_bytes(loaded.device) - _activation_bytes(loaded, settings)
        budget = int(free * SHARE_OF_FREE[loaded.device.type])
    most = MAX_SLOTS // (pages.of_window * loaded.backend.page_size)
    sequences = step_limits(settings, loaded.device).max_num_seqs
    slots = min(budget // pages.num_bytes, sequences, most)
    if slots < 1:
        raise OutOfCacheMemory(
            f"A window of this model needs {pages.num_bytes:,} bytes for what its text attends to, "
            f"but there are {max(budget, 0):,}: free memory, use a smaller model, or set "
            "--kv-cache-memory."
        )
    return slots


def _activation_bytes(loaded: LoadedSpeech, settings: EngineConfig) -> int:
    """Bound what a step takes on its way: states of the windows that are encoded, and logits."""
    model, size = loaded.architecture, loaded.dtype.itemsize
    widths = 8 * model.hidden_size + 2 * max(model.encoder_inner, model.decoder_inner)
    frames = WINDOWS_AT_ONCE * model.window_frames
    logits = 2 * step_limits(settings, loaded.device).max_num_seqs * model.vocab_size * (size + 4)
    return frames * widths * size + logits
