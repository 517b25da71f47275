"""Assembly of a decoder's loop: pages, table, scheduler and graphs, without a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..config import AdmissionName, EngineConfig
from ..kernels.backends import limit_torch_threads
from ..kernels.layer_groups import LayerGroup
from ..model.config.device import choose_steps_ahead, step_limits
from ..model.network.kv_cache_size import KVCacheSize, compute_kv_cache_size
from ..model.network.loaded_model import LoadedModel
from ..scheduling.admission import Admission, ArrivalOrder, PrefixOrder, UrgentFirst
from ..scheduling.kv_forecast import KVForecast
from ..scheduling.scheduler import Scheduler
from ..scheduling.state_cache import FEWEST_COPIED
from ..scheduling.step_budget import MAX_SCORED_ROWS
from ..scheduling.table import SequenceTable
from ..speculation.drafter import NgramDrafter
from ..state.groups import Pages, StateGroup, Visibility
from ..state.pages import PagePool
from ..state.rows import Rows
from .cuda_graphs import Capture, capture_on, make_graphs
from .deduplication import Deduplicator
from .generation import GenerationCore
from .memory_profile import peak_memory_on, step_bytes
from .runner import Runner

ADMISSIONS: dict[AdmissionName, Callable[[], Admission]] = {
    "arrival": ArrivalOrder,
    "prefix": PrefixOrder,
}


def measured_room(
    model: LoadedModel, config: EngineConfig, free: Callable[[], int] | None = None
) -> KVCacheSize:
    """Return the room left by the largest step, which runs once if its memory can be measured.

    `free` returns the memory that is left then, if other devices count as well.
    """
    used, peak_of = None, peak_memory_on(model.device)
    if peak_of is not None and config.kv_cache_memory is None:
        limits = step_limits(config, model.device)
        used = step_bytes(model, limits, lambda room: make_core(model, room, config), peak_of)
    return compute_kv_cache_size(
        model, config, step_bytes=used, free=None if free is None else free()
    )


def make_core(
    model: LoadedModel,
    room: KVCacheSize,
    config: EngineConfig,
    captures: Capture | None = None,
    *,
    keeps_ids: bool | None = None,
) -> GenerationCore:
    """Give a loaded model its pages, table and scheduler; None selects the device's default."""
    if not model.network.needs_torch:
        limit_torch_threads(model.device)
    limits = step_limits(config, model.device)
    layer_groups = model.layer_groups
    attention = model.attention(room.num_pages, room.num_rows, layer_groups)
    table = SequenceTable(
        limits.max_num_seqs,
        room.max_model_len,
        attention.page_size,
        model.original_positions,
    )
    pool = PagePool(room.num_pages)
    budget = limits.max_num_batched_tokens
    groups = further_groups(layer_groups[1:], pool, table, budget)
    if model.recurrent_shapes:
        groups.append(Rows(PagePool(room.num_rows), table.page_size, limits.max_num_seqs))
    admission = UrgentFirst(ADMISSIONS[config.admission](), table.num_running_of)
    if keeps_ids is None:
        keeps_ids = model.device.type == "cuda"
    forecast = None
    if config.kv_forecast:
        forecast = KVForecast(table, pool, 1 + sum(_grows(group, pool, room) for group in groups))
    steps_ahead = choose_steps_ahead(config, model.device)
    scheduler = Scheduler(
        table,
        pool,
        admission,
        budget,
        keeps_ids=keeps_ids,
        groups=groups,
        forecast=forecast,
        max_scored_rows=budget if model.has_head else MAX_SCORED_ROWS,
        drafter=_make_drafter(table, groups, config, steps_ahead),
        fewest_copied=FEWEST_COPIED if attention.copies_slots and not keeps_ids else 0,
    )
    captures = captures or capture_on(model.device)
    graphs = make_graphs(model, attention, table, budget, captures)
    num_kept_pages = room.num_pages if keeps_ids else None
    runner = Runner(model, attention, table, graphs, num_kept_pages=num_kept_pages, groups=groups)
    duplicates = Deduplicator(is_on=config.deduplication)
    return GenerationCore(scheduler, runner, model.vocab_size, steps_ahead, duplicates)


def _make_drafter(
    table: SequenceTable,
    groups: Sequence[StateGroup],
    config: EngineConfig,
    steps_ahead: int,
) -> NgramDrafter | None:
    """Return the drafter; None if it is off, or if layers cannot forget a draft.

    It is also None if a step is prepared while another runs, whose last tokens a draft would need.
    """
    if steps_ahead or not config.speculative_decoding:
        return None
    return NgramDrafter(table) if all(isinstance(group, Pages) for group in groups) else None


def _grows(group: StateGroup, pool: PagePool, room: KVCacheSize) -> bool:
    """Return whether a group takes pages of the pool for every token."""
    most = room.max_model_len
    return group.pool is pool and group.most_pages(most) > group.most_pages(most // 2)


def further_groups(
    layer_groups: Sequence[LayerGroup], pool: PagePool, table: SequenceTable, step_tokens: int
) -> list[StateGroup]:
    """Return the page groups of layers after the first group."""
    groups: list[StateGroup] = []
    for number, group in enumerate(layer_groups, start=1):
        visibility = None
        if (shape := group.visible) is not None:
            visibility = Visibility(shape.first_visible, shape.most_visible)
        groups.append(
            Pages(
                pool,
                table.page_size,
                np.zeros_like(table.pages),
                np.zeros_like(table.num_pages),
                np.zeros_like(table.sources),
                visibility=visibility,
                step_tokens=step_tokens,
                tag=bytes([number]),
            )
        )
    return groups
