"""`[windows]`, `[retention]`, `[reuse]`, `[limits]`, `[budget]`: retention and limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic import field_validator as field_check

from infra.config.table import Table
from tidemill.batch.batch_request import MAX_WINDOW_SECONDS, window_seconds
from tidemill.batch.errors import InvalidOption

Days = Annotated[int, Field(ge=0, le=3650)]
Count = Annotated[int, Field(ge=0, le=10**15)]
# CloudWatch Logs keeps logs for one of these numbers of days only.
LogDays = Literal[1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731]
_DAY_SECONDS = 24 * 3600
# Finishing a batch is given up after one day; another day is a margin.
_MIN_WORK_DAYS = MAX_WINDOW_SECONDS // _DAY_SECONDS + 2


class Windows(Table):
    """Completion windows of batches."""

    default: str = "24h"

    @field_check("default")
    @classmethod
    def _check_default(cls, window: str) -> str:
        try:
            window_seconds(window, param="default")
        except InvalidOption as exc:
            raise ValueError(f'is "{window}"; it can be from 30m to 14d, such as 24h') from exc
        return window


class Retention(Table):
    """Retention periods in days; 0 keeps results and inputs for ever.

    With `erase_batches` the API can permanently erase ended batches with their files.
    """

    input_days: Days = 0
    output_days: Days = 90
    work_days: Annotated[int, Field(ge=_MIN_WORK_DAYS, le=3650)] = _MIN_WORK_DAYS
    log_days: LogDays = 30
    table_days: Annotated[int, Field(ge=2, le=3650)] = 90
    erase_batches: bool = False

    @property
    def file_days(self) -> int:
        """Retention of files that the API created, inputs included, which running batches read."""
        return self.output_days and max(self.output_days, self.work_days)

    @property
    def media_days(self) -> int:
        """Retention of media: that of dropped files, but a batch must find new media."""
        return self.input_days and max(self.input_days, self.work_days)


class Reuse(Table):
    """`[reuse]`: results that are stored for later batches of their tenant.

    They are stored for `days`, at most `max_gib` per tenant; with `sampled` also sampled results,
    each for its own line.
    """

    days: Annotated[int, Field(ge=1, le=3650)] = 90
    max_gib: Annotated[int, Field(ge=1, le=10**6)] = 16
    sampled: bool = False


class Limits(Table):
    """Default limits of a tenant, unless `tidemill tenants set` changes them; 0 means no limit."""

    requests_per_minute: Count = 3000
    requests_per_day: Count = 0
    queued_lines: Count = 0
    bytes_per_day: Count = 0
    gpu_hours_per_day: Count = 0


class Budget(Table):
    """Limits of the whole deployment; 0 means no limit."""

    gpu_hours_per_day: Count = 0
