"""Answers to the rows of a Ray Dataset, from engines in a pool of actors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine import Questions
from ..options import decision_keys, require, split_options
from .engine_pool import EnginePool

if TYPE_CHECKING:
    from ray.data import Dataset


def answer(
    ds: Dataset,
    recipe: str | Path | None = None,
    *,
    engines: int | tuple[int, int] = 1,
    gpus_per_engine: int | None = None,
    num_cpus: float | None = None,
    batch_size: int = 64,
    max_concurrency: int | None = None,
    max_tasks_in_flight_per_actor: int | None = None,
    accelerator_type: str | None = None,
    resources: Mapping[str, float] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """Return a dataset with answers in columns next to its own, as `tidemill run` writes them.

    `recipe` is a recipe file. `options` are recipe keys, which override the file's
    (`prompt="Label: {{ text }}"`), and engine options (`model=`, `max_num_seqs=`). `engines` is the
    number of engines, or its minimum and maximum. By default, each engine has one GPU if the
    cluster has any. Nothing runs until the dataset is read. Raises TidemillError for invalid
    options, before a model is loaded; column `error` contains the error of a failed row.
    """
    require("tidemill.ray", "ray", "tables")
    # Imported late: these need the extra.
    from .recipe_check import checked_keys
    from .table_actor import TableActor

    pool = EnginePool(
        engines=engines,
        gpus_per_engine=gpus_per_engine,
        num_cpus=num_cpus,
        batch_size=batch_size,
        max_concurrency=max_concurrency,
        max_tasks_in_flight_per_actor=max_tasks_in_flight_per_actor,
        accelerator_type=accelerator_type,
        resources=resources,
        runtime_env=runtime_env,
    )
    of_engine, given = split_options(options)
    keys = checked_keys(recipe, given, ds)
    rows = pool.rows_per_task
    # A single block, as of a file, would be one task on one engine, retried from its first row.
    blocks = ds.repartition(target_num_rows_per_block=rows)
    return pool.map_batches(blocks, TableActor, {"keys": keys}, of_engine, rows_per_task=rows)


def decide(
    ds: Dataset, input: str, questions: Questions, *, model: str | None = None, **options: Any
) -> Dataset:
    """Return a dataset with the answers to questions about the column `input`, as typed columns.

    `questions` have a recipe's short form (`"damaged: Is an item damaged?"`) or its keys (`name`,
    `instructions`, `choices` or `levels`). `options` are those of `answer`.
    """
    return answer(ds, model=model, **{**options, **decision_keys(input, questions)})
