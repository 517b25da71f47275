"""Processors with the signature of `ray.data.llm`: preprocess, engines, postprocess."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import TidemillError
from ..options import require
from .engine_pool import EnginePool
from .processor_config import vLLMEngineProcessorConfig
from .processor_requests import CONSUMED, LINES, RowRequests
from .processor_results import ERROR, ROWS, result_columns

if TYPE_CHECKING:
    from ray.data import Dataset

_LOG = logging.getLogger(__name__)
_DATA = "__data"
_INPUTS = {
    "generate": "messages (or prompt without the chat template stage), sampling_params",
    "embed": "messages (or prompt without the chat template stage)",
    "classify": "text_1, text_2",
    "score": "text_1, text_2",
}

RowFunction = Callable[[dict[str, Any]], dict[str, Any]]


def build_processor(  # noqa: PLR0917 - Ray's signature
    config: Any,
    preprocess: RowFunction | None = None,
    postprocess: RowFunction | None = None,
    preprocess_map_kwargs: dict[str, Any] | None = None,
    postprocess_map_kwargs: dict[str, Any] | None = None,
    builder_kwargs: dict[str, Any] | None = None,
) -> Processor:
    """Return a processor that maps a dataset, as `ray.data.llm.build_processor` does.

    `config` is a vLLMEngineProcessorConfig from this module or from Ray. Raises TidemillError with
    the name of anything that is not supported.
    """
    require("tidemill.ray", "ray", "tables")
    settings = vLLMEngineProcessorConfig.parse(config)
    settings.check_multimodal_stage()
    of_builder = dict(builder_kwargs or {})
    template_kwargs = of_builder.pop("chat_template_kwargs", None)
    if of_builder:
        raise TidemillError(f"builder_kwargs: `{next(iter(of_builder))}` is not supported")
    stage = settings.chat_template
    requests = RowRequests(
        settings.task_type,
        settings.model_source,
        bool(stage),
        stage.get("chat_template_kwargs") or template_kwargs,
    )
    return Processor(
        settings.pool(),
        settings.engine_options(),
        _Before(preprocess, requests),
        _After(postprocess, settings.task_type, settings.should_continue_on_error),
        preprocess_map_kwargs or {},
        postprocess_map_kwargs or {},
    )


@dataclass(frozen=True, slots=True)
class Processor:
    """Callable that maps a dataset by `before`, the engines of a pool, and `after`."""

    pool: EnginePool
    options: Mapping[str, Any]
    before: _Before
    after: _After
    before_kwargs: Mapping[str, Any]
    after_kwargs: Mapping[str, Any]

    def __call__(self, dataset: Dataset) -> Dataset:
        """Return the mapped dataset; nothing runs until it is read."""
        from .line_actor import LineActor  # late: it needs the extra

        requests = dataset.map(self.before, **self.before_kwargs)
        answered = self.pool.map_batches(requests, LineActor, {}, self.options)
        return answered.map(self.after, **self.after_kwargs)

    def log_input_column_names(self) -> None:
        """Log the columns that rows must have after preprocess."""
        _LOG.info("Required input columns: %s", _INPUTS[self.after.task_type])


@dataclass(frozen=True, slots=True)
class _Before:
    """Maps a row to itself and its request, built from the result of `preprocess`."""

    preprocess: RowFunction | None
    requests: RowRequests

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        data = row if self.preprocess is None else {**row, **self.preprocess(row)}
        line = self.requests.line(data)
        return {_DATA: {name: data[name] for name in data if name not in CONSUMED}, LINES: line}


@dataclass(frozen=True, slots=True)
class _After:
    """Maps a row and its answer to the result of `postprocess`."""

    postprocess: RowFunction | None
    task_type: str
    continues_on_error: bool

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        data = {**row[_DATA], **result_columns(self.task_type, row[ROWS])}
        if data[ERROR]:
            if not self.continues_on_error:
                raise TidemillError(f"a row failed: {data[ERROR]}")
            return data
        found = dict(data if self.postprocess is None else self.postprocess(data))
        if self.continues_on_error:
            found[ERROR] = ""
        return found
