"""Options of `tidemill run`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from ..arguments.argument_types import S3Folder
from ..arguments.cascade_flags import CascadeOptions
from ..arguments.defaults import Defaults
from ..console.errors import Refused
from ..engine.data_parallel import DataParallelSize
from ..engine.options import EngineOptions
from ..files.paths import STANDARD_STREAM, is_path
from ..files.s3_object import is_s3
from ..files.shard import Shard
from ..files.table_options import ECHO_OF_TABLE, TableOptions
from .reuse_flags import check_reuse


@dataclass(frozen=True, slots=True)
class RunOptions(EngineOptions):
    """Options of a run and its engine. Sizes are bytes; None means the default.

    `line_url` is the endpoint of lines without one. Rows have the `echo_fields` of their lines.
    `typed_flags` are the words that a retry repeats. A `stage` of a cascade writes only the rows of
    one model, and its own card, to `output_file`. `row_calibration` has the keys that calibrate the
    rows of requests; those of a table are in its recipe.
    """

    input_file: str
    output_file: str
    error_file: str | None = None
    shard: Shard | None = None
    line_url: str | None = None
    echo_fields: tuple[str, ...] = ()
    output_tmp_dir: Path | None = None
    dialect: Literal["openai", "vllm"] = "openai"
    on_invalid_line: Literal["fail", "skip"] = "fail"
    strict_parameters: bool = False
    resume: bool = False
    retry_failed: bool = False
    retry_truncated: bool = False
    allow_other_settings: bool = False
    force: bool = False
    fail_on_error: bool = False
    max_inflight: int | None = None
    max_line_bytes: int | None = None
    no_plan: bool = False
    reuse: Path | S3Folder | None = None
    reuse_sampled: bool = False
    reuse_max_size: int | None = None
    max_seconds: float | None = None
    max_cost: float | None = None
    price_per_hour: float | None = None
    defaults: Defaults = field(default_factory=Defaults)
    table: TableOptions | None = None
    row_calibration: Mapping[str, Any] = field(default_factory=dict)
    cascade: CascadeOptions | None = None
    stage: Literal["first", "second"] | None = None
    data_parallel_size: DataParallelSize = None
    no_card: bool = False
    card_markdown: bool = False
    enable_metrics: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    typed_flags: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        """Raise Refused for flags that require others, or cannot be combined."""
        check_reuse(self.reuse, self.reuse_max_size, sampled=self.reuse_sampled)
        if self.echo_fields and self.table is not None:
            raise Refused(ECHO_OF_TABLE)
        if self.line_url is not None and self.shard is not None:
            raise Refused("--url cannot be combined with --shard: write `url` in each line")
        if self.row_calibration and self.cascade is not None:
            raise Refused(
                "--escalate cannot be combined with a calibration, because each model would need "
                "its own: omit one"
            )

    @property
    def target(self) -> Path:
        """Return the path of the rows, or of the table that is made of them."""
        if self.table is None or self.stage is not None:
            return Path(self.output_file)
        return self.table.output

    def with_media_buckets(self) -> Self:
        """Return the options for engines, which may read all of the user's buckets by default.

        The default does not apply to an input from the web, whose URLs are not the user's.
        """
        name = self.input_file
        is_own = name == STANDARD_STREAM or is_path(name) or is_s3(name)
        if self.allowed_media_buckets or not is_own:
            return self
        return replace(self, allowed_media_buckets=("*",))

    @property
    def seconds_limit(self) -> float | None:
        """Return the seconds after which the run stops; None without a limit.

        Raises Refused for a cost without a price.
        """
        limits = [] if self.max_seconds is None else [self.max_seconds]
        if self.max_cost is not None:
            if self.price_per_hour is None:
                raise Refused("--max-cost requires --price-per-hour, the price of this machine")
            limits.append(3600 * self.max_cost / self.price_per_hour)
        return min(limits, default=None)
