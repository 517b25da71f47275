"""Settings of a deployment, read from the environment variables `TIDEMILL_*`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    Json,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from tidemill.batch.batch_request import DEFAULT_WINDOW, window_seconds
from tidemill.batch.errors import InvalidOption
from tidemill.batch.intake_progress import RANGE_BYTES
from tidemill.batch.model import Batch
from tidemill.batch.object_keys import DROP_TENANT, tenant_of_drop
from tidemill.batch.progress_counts import Progress
from tidemill.batch.shard_cutter import MAX_SHARD_BYTES, MAX_SHARD_LINES, ShardLimits

_PREFIX = "TIDEMILL_"
_DAY_SECONDS = 24 * 3600


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a tenant: API calls per minute and day, uploaded bytes per day (UTC), lines.

    Lines are those of active batches. GPU hours are per day. 0 means no limit.
    """

    requests_per_day: NonNegativeInt = 0
    queued_lines: NonNegativeInt = 0
    bytes_per_day: NonNegativeInt = 0
    requests_per_minute: NonNegativeInt = 0
    gpu_hours_per_day: NonNegativeInt = 0


@dataclass(frozen=True, slots=True)
class Oidc:
    """Issuer of users' tokens, their audience, and the claim that names their tenant."""

    issuer: str
    audience: str
    tenant_claim: str


class Settings(BaseModel):
    """Names of a deployment's resources, and its limits.

    `work_queues` maps the name of each served model to the URL of its queue, `model_aliases` other
    names that requests may use to those (`*` matches all others), `model_adapters` the names of
    their adapters, `gpu_hour_prices` to the price of a GPU-hour, which makes reports show
    costs. `default_window` is the completion window of an upload that names none. The table
    forgets a batch `keep_days` after that window. `limits` apply to tenants without their own
    limits, `gpu_hours_per_day` to all tenants together; 0 means no limit.
    Files are deleted `file_days` after their creation, never if that is 0.
    `intake_queue` gets the messages of files to be read, `drops_queue` those of uploads to the
    bucket; without one the control queue does.
    With `drop_tenants` the first folder below `input/` names the tenant of an upload; with
    `erase_batches` clients may erase ended batches.
    One run reads about `range_bytes` of a file.
    `fleets` is the path of the parameters with the fleet plans; empty without a launcher.
    `auth` is the authentication of callers: by keys, or by requests signed with AWS credentials;
    with `oidc` tokens of its issuer are accepted in addition to keys.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    table: str
    bucket: str
    control_queue: str
    intake_queue: str = ""
    drops_queue: str = ""
    drop_tenants: bool = False
    erase_batches: bool = False
    fleets: str = ""
    work_queues: Json[dict[str, str]] = Field(default_factory=dict)
    model_aliases: Json[dict[str, str]] = Field(default_factory=dict)
    model_adapters: Json[dict[str, str]] = Field(default_factory=dict)
    event_bus: str = "default"
    auth: Literal["keys", "iam"] = "keys"
    oidc: Json[Oidc] | None = None
    shard_lines: PositiveInt = MAX_SHARD_LINES
    shard_bytes: PositiveInt = MAX_SHARD_BYTES
    range_bytes: PositiveInt = RANGE_BYTES
    gpu_hour_prices: Json[dict[str, PositiveFloat]] = Field(default_factory=dict)
    currency: str = "USD"
    strict_endpoint: bool = False
    limits: Json[Limits] = Limits()
    gpu_hours_per_day: NonNegativeInt = 0
    max_attempts: PositiveInt = 5
    default_window: str = DEFAULT_WINDOW
    # A batch that does not end is given up a day late: the table must still contain it then.
    keep_days: Annotated[int, Field(ge=2)] = 90
    file_days: Annotated[int, Field(ge=0)] = 0

    @field_validator("default_window")
    @classmethod
    def _check_window(cls, window: str) -> str:
        try:
            window_seconds(window, param="default_window")
        except InvalidOption as exc:
            raise ValueError(exc.message) from exc
        return window

    def forget_at(self, expires_at: int) -> int:
        """Return the expiry in the table of a batch whose window ends at `expires_at`."""
        return expires_at + self.keep_days * _DAY_SECONDS

    def file_expires_at(self, created_at: int) -> int | None:
        """Return the default expiry of a file, None for never."""
        return created_at + self.file_days * _DAY_SECONDS if self.file_days else None

    def gpu_hour_price(self, model: str | None) -> float | None:
        """Return the price of a GPU-hour of a model's workers; None if unknown."""
        return None if model is None else self.gpu_hour_prices.get(model)

    def gpu_hour_price_of(self, batch: Batch, done: Progress) -> float | None:
        """Return the mean price of the GPU time of a batch, which may have used two models."""
        price = self.gpu_hour_price(batch.model)
        if batch.escalation is None or not done.escalated_gpu_seconds or price is None:
            return price
        second = self.gpu_hour_price(batch.escalation.model)
        share = done.escalated_gpu_seconds / max(done.gpu_seconds, done.escalated_gpu_seconds)
        return None if second is None else price + share * (second - price)

    def tenant_of_drop(self, key: str) -> str:
        """Return the tenant of an upload to the bucket, from its key."""
        return tenant_of_drop(key) if self.drop_tenants else DROP_TENANT

    @property
    def shard_limits(self) -> ShardLimits:
        """Return the limits by which files are cut into shards."""
        return ShardLimits(self.shard_lines, self.shard_bytes)


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Read the settings from an environment; raises pydantic's ValidationError."""
    return Settings.model_validate(
        {
            name.removeprefix(_PREFIX).lower(): value
            for name, value in environment.items()
            if name.startswith(_PREFIX)
        }
    )
