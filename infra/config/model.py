"""`[[models]]`: a served model, its adapters and the workers that run it."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints
from pydantic import field_validator as field_check
from pydantic import model_validator as model_check

from infra.config.table import Table
from infra.gpus import GPUS
from tidemill.batch.batch_request import MAX_WINDOW_SECONDS
from tidemill.batch.weekly_hours import WeeklyHours
from tidemill.offline.console.errors import Refused
from tidemill.offline.engine.worker_parser import check_worker_flags

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$")]
_PREFIX = r"s3://[a-z0-9.-]{3,63}/[^*?$]+"
Alias = Annotated[str, StringConstraints(pattern=r"^(\*|[A-Za-z0-9][A-Za-z0-9._/:-]{0,127})$")]
Capacity = Literal["on-demand", "spot", "reserved", "reserved-first"]
_GROUP = r"arn:aws[a-z-]*:resource-groups:[a-z0-9-]+:[0-9]{12}:group/[A-Za-z0-9_.-]+"
KEY = r"arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/[A-Za-z0-9-]+"


# For reserved machines, exclusively or before others.
_RESERVED = ("reserved", "reserved-first")


class Adapter(Table):
    """An adapter of a model: a name that requests may use, and the folder of its weights."""

    name: Name
    weights: Annotated[str, StringConstraints(pattern=rf"^{_PREFIX}$")]


class Model(Table):
    """A served model and the workers that run it.

    `weights_region` is the region of weights, adapters included, if the workers run in another;
    `weights_key` is the KMS key that encrypts them. `gpu` is empty if workers run elsewhere;
    `tensor_parallel_size` of a worker's GPUs share the model, by default all, and each such group
    has an engine. `memory_gib` is a worker's memory, at most nine tenths of its machine's;
    `max_price_factor` bounds a machine's price, as a multiple of the cheapest. `capacity` defaults
    to the deployment's. During `min_workers_hours`, `min_workers` stay even without work.
    """

    name: Name
    weights: Annotated[str, StringConstraints(pattern=rf"^({_PREFIX})?$")] = ""
    weights_region: Annotated[str, StringConstraints(pattern=r"^([a-z]{2}(-[a-z]+)+-[0-9]+)?$")] = (
        ""
    )
    weights_key: Annotated[str, StringConstraints(pattern=rf"^({KEY})?$")] = ""
    gpu: str = ""
    gpus_per_worker: Annotated[int, Field(ge=1, le=8)] = 1
    tensor_parallel_size: Annotated[int, Field(ge=1, le=8)] | None = None
    memory_gib: Annotated[int, Field(ge=4, le=2048)] | None = None
    capacity: Capacity | None = None
    reservation_group: Annotated[str, StringConstraints(pattern=rf"^({_GROUP})?$")] = ""
    max_price_factor: Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)] = 2.0
    machine_idle_minutes: Annotated[int, Field(ge=0, le=60)] | None = None
    min_workers: Annotated[int, Field(ge=0, le=1000)] = 0
    min_workers_hours: str = ""
    max_workers: Annotated[int, Field(ge=1, le=1000)] = 1
    target_minutes: Annotated[int, Field(ge=1, le=MAX_WINDOW_SECONDS // 60)] = 60
    idle_minutes: Annotated[int, Field(ge=1, le=24 * 60)] = 5
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    quantization: Literal["", "fp8"] = ""
    gpu_hour_price: Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)] = 0.0
    aliases: Annotated[tuple[Alias, ...], Field(strict=False)] = ()
    adapters: Annotated[tuple[Adapter, ...], Field(strict=False)] = ()
    args: tuple[str, ...] = Field(default=(), strict=False)

    @field_check("gpu")
    @classmethod
    def _check_gpu(cls, gpu: str) -> str:
        if gpu not in GPUS:
            raise ValueError(f'is "{gpu}"; it can be {", ".join(GPUS)}')
        return gpu

    @field_check("min_workers_hours")
    @classmethod
    def _check_hours(cls, hours: str) -> str:
        try:
            WeeklyHours.parse(hours)
        except ValueError as exc:
            raise ValueError(f'is "{hours}": {exc}') from exc
        return hours

    @field_check("args")
    @classmethod
    def _check_args(cls, args: tuple[str, ...]) -> tuple[str, ...]:
        """Parse the flags as the worker will; otherwise only a machine with a GPU would."""
        for arg in args:
            flag, _, value = arg.partition(" ")
            if flag.startswith("--") and value and "=" not in flag:
                raise ValueError(
                    f'has "{arg}" as one string: write flag and value as two, "{flag}", "{value}"'
                )
        try:
            check_worker_flags(args)
        except Refused as exc:
            raise ValueError(f"is invalid: {exc}") from exc
        return args

    @model_check(mode="after")
    def _check_workers(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError(f"has min_workers above max_workers = {self.max_workers}")
        if self.min_workers_hours and not self.min_workers:
            raise ValueError("has min_workers_hours without min_workers")
        return self

    @model_check(mode="after")
    def _check_count(self) -> Self:
        if not self.gpu:  # workers that run elsewhere
            return self
        counts = GPUS[self.gpu].instances
        if self.gpus_per_worker not in counts:
            shown = ", ".join(str(count) for count in counts)
            raise ValueError(
                f"has gpus_per_worker = {self.gpus_per_worker}; "
                f"machines with {self.gpu} have {shown}"
            )
        if self.gpus_per_worker % self.gpus_per_engine:
            raise ValueError(
                f"has tensor_parallel_size = {self.tensor_parallel_size}, which does not divide "
                f"gpus_per_worker = {self.gpus_per_worker}"
            )
        if not self.machines:
            raise ValueError(f"has memory_gib = {self.memory_gib}, more than its machines have")
        if self.reservation_group and self.capacity not in _RESERVED:
            raise ValueError('has a reservation_group, which requires capacity = "reserved"')
        return self

    @property
    def gpus_per_engine(self) -> int:
        """Return how many GPUs share the model: by default, all of a worker."""
        return self.tensor_parallel_size or self.gpus_per_worker

    @property
    def worker_gib(self) -> int:
        """Return the memory of a worker: by default, what the smallest machine leaves for it."""
        return self.memory_gib or GPUS[self.gpu].memory_gib * self.gpus_per_worker

    @property
    def machines(self) -> tuple[str, ...]:
        """Return the instance types that fit a worker, the cheapest first."""
        return GPUS[self.gpu].machines(self.gpus_per_worker, self.worker_gib)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Return the weights' locations, adapters' included, as s3://bucket/prefix."""
        named = (self.weights, *(adapter.weights for adapter in self.adapters))
        return tuple(prefix for prefix in named if prefix)

    @property
    def slug(self) -> str:
        """Return the name in a form that names of AWS resources allow."""
        letters = (char if char.isalnum() else "-" for char in self.name.lower())
        return "-".join(word for word in "".join(letters).split("-") if word)[:40].rstrip("-")
