"""Engine pool: the size and the resources of engine actors for `Dataset.map_batches`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import TidemillError
from ..options import check_options

if TYPE_CHECKING:
    from ray.data import Dataset

SEQUENCES_OF_GPU = 1024
SEQUENCES_OF_CPU = 256
_INFLIGHT_PER_SEQUENCE = 4
_BATCHES_PER_TASK = 4
_MIN_CALLS = 2
_BOTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePool:
    """Size and resources of a pool: `engines` is its size, or its minimum and maximum.

    Raises TidemillError for invalid values.
    """

    engines: int | tuple[int, int] = 1
    gpus_per_engine: int | None = None
    num_cpus: float | None = None
    batch_size: int = 64
    max_tasks_in_flight_per_actor: int | None = None
    max_concurrency: int | None = None
    accelerator_type: str | None = None
    resources: Mapping[str, float] | None = None
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raise TidemillError for an invalid size or resource."""
        sizes: tuple[Any, ...] = self.sizes
        if len(sizes) != _BOTH or not all(map(_is_positive, sizes)) or sizes[0] > sizes[-1]:
            raise TidemillError(
                f"`engines` must be a number, or a minimum and a maximum, such as (1, 4); got "
                f"{self.engines!r}"
            )
        for name in ("batch_size", "max_tasks_in_flight_per_actor", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and not _is_positive(value):
                raise TidemillError(f"`{name}` must be a whole number ≥ 1; got {value!r}")
        gpus = self.gpus_per_engine
        if gpus is not None and gpus != 0 and not _is_positive(gpus):
            raise TidemillError(f"`gpus_per_engine` must be a whole number ≥ 0; got {gpus!r}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the minimum and the maximum number of engines."""
        return self.engines if isinstance(self.engines, tuple) else (self.engines, self.engines)

    @property
    def rows_per_task(self) -> int:
        """Return the number of rows per Ray task: four batches."""
        return _BATCHES_PER_TASK * self.batch_size

    def map_batches(
        self,
        ds: Dataset,
        actor: type,
        given: Mapping[str, Any],
        options: Mapping[str, Any],
        *,
        rows_per_task: int | None = None,
    ) -> Dataset:
        """Return the dataset mapped by engine actors, created from `given` and engine `options`.

        A task has at least one batch, or `rows_per_task` rows. Raises TidemillError for an unknown
        engine option.
        """
        from ray.data import ActorPoolStrategy  # late: slow to load

        num_gpus = self._num_gpus()
        checked = _engine_options(options, num_gpus)
        calls = self.max_concurrency or self._enough_calls(
            checked.get("max_num_seqs"), num_gpus, rows_per_task or self.batch_size
        )
        least, greatest = self.sizes
        compute = ActorPoolStrategy(
            min_size=least,
            max_size=greatest,
            max_tasks_in_flight_per_actor=self.max_tasks_in_flight_per_actor or calls,
            max_concurrent_calls_per_actor=calls,
        )
        found = {
            "num_gpus": num_gpus or None,
            "num_cpus": self.num_cpus,
            "accelerator_type": self.accelerator_type,
            "resources": None if self.resources is None else dict(self.resources),
            "runtime_env": None if self.runtime_env is None else dict(self.runtime_env),
        }
        return ds.map_batches(
            actor,
            fn_constructor_kwargs={**given, "options": checked},
            batch_size=self.batch_size,
            batch_format="pyarrow",
            udf_modifying_row_count=False,
            compute=compute,
            **{name: value for name, value in found.items() if value is not None},
        )

    def _num_gpus(self) -> int:
        import ray

        if self.gpus_per_engine is None:
            return int(ray.cluster_resources().get("GPU", 0) > 0)
        return self.gpus_per_engine

    def _enough_calls(self, max_num_seqs: int | None, num_gpus: int, num_rows: int) -> int:
        """Return the number of tasks with `num_rows` rows that keeps an engine busy."""
        sequences = max_num_seqs or (SEQUENCES_OF_GPU if num_gpus else SEQUENCES_OF_CPU)
        return max(_MIN_CALLS, -(-_INFLIGHT_PER_SEQUENCE * sequences // num_rows))


def _engine_options(options: Mapping[str, Any], num_gpus: int) -> dict[str, Any]:
    """Return the options of an engine with `num_gpus` GPUs; raises TidemillError."""
    found = {"device": "cuda" if num_gpus else "cpu", **options}
    if num_gpus > 1:
        found.setdefault("tensor_parallel_size", num_gpus)
    check_options(found)
    shared = int(found.get("tensor_parallel_size") or 1)
    if shared > max(1, num_gpus):
        raise TidemillError(
            f"`tensor_parallel_size` is {shared}, but an engine has {num_gpus} GPUs: set "
            f"gpus_per_engine={shared}"
        )
    return found


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
