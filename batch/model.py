"""The values of the domain: a batch, its shards, and what they have cost so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any, Literal

from .file.expected_tokens import NO_TOKENS, ExpectedTokens
from .file.formats import FileFormat
from .file.throughput import Rates
from .file.unknown_parameters import UnknownParameter
from .states import TERMINAL, Status, check_move

OnInvalidLine = Literal["fail", "skip"]
UploadWay = Literal["parts", "urls"]
WebhookDelivery = Literal["pending", "delivered", "failed"]

MAX_COST_REACHED = "max_cost_reached"


@dataclass(frozen=True, slots=True)
class Source:
    """An object to read, pinned: `version_id` where the bucket keeps versions, the ETag always."""

    bucket: str
    key: str
    etag: str
    num_bytes: int
    version_id: str | None = None


@dataclass(frozen=True, slots=True)
class BatchError:
    """One entry of a Batch's `errors`; `line` counts from 1 with blank lines."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a batch, beside its lines.

    No line is begun once its GPU time has come to `max_cost`, in the deployment's currency.
    Its result files are forgotten `output_expires_seconds` after they were made, if that is set.
    With `strict_parameters` a file with unknown parameters is refused. `recipe` has the keys of a
    table's recipe that stood in the user metadata of an upload, as text.
    """

    completion_window: str = "24h"
    output_url: str | None = None
    error_url: str | None = None
    on_invalid_line: OnInvalidLine = "fail"
    metadata: dict[str, str] = field(default_factory=dict)
    output_expires_seconds: int | None = None
    webhook_url: str | None = None
    max_cost: float | None = None
    strict_parameters: bool = False
    recipe: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outputs:
    """Object keys of a batch's results, all in its own bucket; `table_key` where it was a table."""

    output_key: str
    error_key: str
    report_key: str
    table_key: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Rows, what they cost, and time, as absolute counts: of a shard, or summed over shards.

    Rows are durable ones only, and expected tokens what intake expected of them. Those that were
    `reused` are among the completed ones, and cost neither tokens nor time. The rates are
    recent ones, of tokens the generated ones unless they are named otherwise; a sum adds them up.
    `truncated` rows are completed ones whose answer was cut off at its token limit.
    """

    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    gpu_seconds: float = 0.0
    rows_per_second: float = 0.0
    tokens_per_second: float = 0.0
    audio_seconds: float = 0.0
    input_tokens_per_second: float = 0.0
    audio_seconds_per_second: float = 0.0
    reasoning_tokens: int = 0
    expected_input_tokens: int = 0
    expected_output_tokens: int = 0
    reused: int = 0
    truncated: int = 0

    def __add__(self, other: Progress) -> Progress:
        """Return the sum, field by field."""
        return sum_of((self, other))

    def since(self, earlier: Progress) -> Progress:
        """Return what has been added since, field by field and never less than nothing."""
        both = zip(_counts_of(self), _counts_of(earlier), strict=True)
        return Progress(*(max(type(now)(0), now - then) for now, then in both)).without_rates

    @property
    def rates(self) -> Rates:
        """The rates alone, to three places."""
        return Rates(*(round(getattr(self, name), 3) for name in Rates._fields))

    @property
    def without_rates(self) -> Progress:
        """The same counts of what nobody runs: without rates."""
        return replace(self, **Rates()._asdict())

    @property
    def expected(self) -> ExpectedTokens:
        """Tokens that intake expected of these rows."""
        return ExpectedTokens(self.expected_input_tokens, self.expected_output_tokens)

    @property
    def num_rows(self) -> int:
        """Rows that are durable, good or bad."""
        return self.completed + self.failed


_counts_of: Callable[[Progress], tuple[Any, ...]] = attrgetter(
    *(each.name for each in fields(Progress))
)


def sum_of(progresses: Iterable[Progress]) -> Progress:
    """Return the sum, field by field, also of thousands; of none nothing."""
    return Progress(*map(sum, zip(*map(_counts_of, progresses), strict=True)))


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Model revision and engine version that computed the rows, for the report."""

    model_revision: str | None = None
    engine_version: str | None = None


@dataclass(frozen=True, slots=True)
class Conversion:
    """Conversion of an input to plain JSONL, by the multipart upload `upload`.

    `num_vain` is how many runs, one after another, have come no further. `recipe` has the keys of a
    table's recipe, as JSON.
    """

    form: FileFormat
    upload: str
    num_vain: int = 0
    recipe: str | None = None


@dataclass(frozen=True, slots=True)
class WebhookTry:
    """One try to tell a webhook: the status of the answer, where there was one, or the error."""

    at: int
    status_code: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Reason that no shard of a batch is begun before `until`, and since when (Unix seconds)."""

    code: str
    message: str
    since: int
    until: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One file being run. Changed by `moved` and by conditional writes only.

    Times are Unix seconds, except `created_ns`, which orders the batches of one second.
    `outcome` is what `finalizing` ends in. `conversion` is how far a file that is no plain JSONL is
    made plain; `failing_since` is when the first message died since intake came further, `failures`
    how many of its runs raised an exception of their own. `source` is the JSONL that shards are
    ranges of: the input, or what was made of the input, which is then `original`. `predecessor` is
    the batch of the same name that this one replaced: its output is published first. So many runs
    have begun to make its table, `table_tries`. Deliveries to urls are `delivered` or `failed`,
    after so many tries. `queued_lines` count against the tenant's limit until the end, of which a
    webhook at `webhook_host` is told then: its next try is due at `webhook_due`. `turn` is the
    Lambda run that has the batch, `turn_until` when the newest one had ended or must have;
    `ended_at` is the end that was chosen. `seen` is what the reaper saw, and `seen_at` since when
    that is so. From `expires` on the table forgets it, long after `expires_at`; None means never,
    here and in what belongs to a batch. Clients see its tombstone alone from `erasing_at` on, and
    at `erased_at` there is nothing else.
    """

    id: str
    tenant: str
    source: Source
    input_file_id: str
    options: Options
    outputs: Outputs
    created_at: int
    expires_at: int
    status: Status = Status.VALIDATING
    endpoint: str = "/v1/chat/completions"
    model: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    outcome: Status | None = None
    errors: tuple[BatchError, ...] = ()
    num_errors: int = 0
    num_rows: int = 0
    expected: ExpectedTokens = NO_TOKENS
    unknown_parameters: tuple[UnknownParameter, ...] = ()
    num_shards: int = 0
    shards_left: int = 0
    shards_rung: int = 0
    original: Source | None = None
    predecessor: str | None = None
    conversion: Conversion | None = None
    failing_since: int | None = None
    failures: int = 0
    output_joining: str | None = None
    error_joining: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    table_file_id: str | None = None
    table_tries: int = 0
    output_delivery: str | None = None
    error_delivery: str | None = None
    output_tries: int = 0
    error_tries: int = 0
    queued_lines: int | None = None
    webhook_host: str | None = None
    webhook_delivery: WebhookDelivery | None = None
    webhook_tries: int = 0
    webhook_due: int | None = None
    webhook_log: tuple[WebhookTry, ...] = ()
    final: Progress | None = None
    ended_at: int | None = None
    engine: EngineInfo = EngineInfo()
    pause: Pause | None = None
    erasing_at: int | None = None
    erased_at: int | None = None
    announced: Status | None = None
    turn: str | None = None
    turn_until: float = 0.0
    seen: str | None = None
    seen_at: int | None = None
    expires: int | None = None
    created_ns: int | None = None

    @property
    def is_terminal(self) -> bool:
        """Say whether the batch has come to its end."""
        return self.status in TERMINAL

    @property
    def has_cost_all(self) -> bool:
        """Say whether it winds up because it has cost all that it may."""
        return any(error.code == MAX_COST_REACHED for error in self.errors)

    @property
    def tombstone(self) -> Batch:
        """Return what remains of a batch that is erased: ids, times and counts, no client's words.

        Neither its options nor its errors, and no name of a file.
        """
        window = self.options.completion_window
        kept = {name: getattr(self, name) for name in _KEPT}
        nothing = Source(self.source.bucket, "", "", 0)
        return Batch(
            **kept,
            source=nothing,
            input_file_id="",
            options=Options(completion_window=window),
            outputs=Outputs("", "", ""),
        )

    def pause_at(self, now: float) -> Pause | None:
        """Return the reason that no shard of it is begun now, None where they are."""
        return self.pause if self.pause is not None and now < self.pause.until else None

    @property
    def input(self) -> Source:
        """Return what was uploaded."""
        return self.original or self.source

    @property
    def is_table_due(self) -> bool:
        """Say whether its rows have been published and are yet to be made a table.

        Those of a batch that was cancelled never are.
        """
        has_rows = self.output_file_id is not None or self.error_file_id is not None
        is_missing = self.outputs.table_key is not None and self.table_file_id is None
        return self.status is Status.FINALIZING and has_rows and is_missing

    @property
    def winds_up_since(self) -> int | None:
        """Since when it has been finalizing or cancelling, None before."""
        return self.finalizing_at or self.cancelling_at

    def moved(self, status: Status, now: int) -> Batch:
        """Return the batch in another status; raises InvalidMove when it cannot be."""
        check_move(self.status, status)
        changes: dict[str, Any] = {"status": status, f"{status}_at": now}
        return replace(self, **changes)


# Of what is erased.
_KEPT = (
    *("id", "tenant", "status", "endpoint", "model", "engine", "expires", "announced", "outcome"),
    *(
        "created_at",
        "created_ns",
        "expires_at",
        "in_progress_at",
        "finalizing_at",
        "completed_at",
        "failed_at",
    ),
    *("expired_at", "cancelling_at", "cancelled_at", "ended_at", "erasing_at", "erased_at"),
    *("num_rows", "num_shards", "final", "predecessor"),
)


class ShardStatus(StrEnum):
    """`done` shards are sealed and never change; the lease says whether a pending one is run."""

    PENDING = "pending"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Shard:
    """A contiguous range of lines, bytes `start` to `end` (exclusive) of the input.

    `first_line` is the number of the line at `start`, blank ones counted; `num_rows` of the lines
    are not blank, of which so many tokens are `expected`. `attempts` counts claims since rows were
    last made durable. `suspects` are groups of lines that ran when an engine died, `quarantined`
    those that killed it once more alone. `output_sizes` and `error_sizes` are the bytes of the
    segments sealed under `fence`. `abandoned` is why the rest of the lines is given up.
    """

    batch_id: str
    number: int
    first_line: int
    num_rows: int
    start: int
    end: int
    status: ShardStatus = ShardStatus.PENDING
    owner: str | None = None
    lease_until: float = 0.0
    fence: int = 0
    attempts: int = 0
    progress: Progress = Progress()
    suspects: tuple[tuple[int, ...], ...] = ()
    quarantined: tuple[int, ...] = ()
    output_sizes: tuple[int, ...] = ()
    error_sizes: tuple[int, ...] = ()
    abandoned: str | None = None
    expires: int | None = None
    expected: ExpectedTokens = NO_TOKENS

    def is_leased(self, now: float) -> bool:
        """Say whether somebody has the right to run it."""
        return self.owner is not None and self.lease_until >= now


@dataclass(frozen=True, slots=True)
class File:
    """An object that clients know by an id of OpenAI's Files API.

    `version_id` is that of the object, where the bucket keeps versions: a later one of the key is
    another file. From `expires` on there is no such file. `created_ns` orders the files of one
    second.
    """

    id: str
    tenant: str
    key: str
    num_bytes: int
    created_at: int
    filename: str
    purpose: str
    expires: int | None = None
    version_id: str | None = None
    created_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Upload:
    """A file in the making, which ends as the file `file_id` or not at all.

    Its bytes come by one of two ways: as small parts through the API, of which `digest` tells which
    were chosen, or to urls at which S3 takes them; `multipart_id` is S3's own upload. After
    `expires_at` it takes nothing any more, and from `expires` on the table forgets it. The file
    goes `file_seconds` after it was made, if that was said.
    """

    id: str
    tenant: str
    num_bytes: int
    filename: str
    purpose: str
    created_at: int
    expires_at: int
    file_id: str
    status: Literal["pending", "completed", "cancelled"] = "pending"
    file_seconds: int | None = None
    way: UploadWay | None = None
    digest: str = ""
    multipart_id: str | None = None
    expires: int | None = None
