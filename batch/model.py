"""Domain values: a batch and its shards."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, Literal, TypeGuard

from .escalation import EscalateBy, Escalation
from .file.expected_tokens import NO_TOKENS, ExpectedTokens
from .file.formats import FileFormat
from .file.lines import Vendor
from .file.unknown_parameters import UnknownParameter
from .progress_counts import NO_PROGRESS, Progress
from .states import TERMINAL, Status, check_move

OnInvalidLine = Literal["fail", "skip"]
WebhookDelivery = Literal["pending", "delivered", "failed"]

MAX_COST_REACHED = "max_cost_reached"
MAX_PRIORITY: Final = 100


@dataclass(frozen=True, slots=True)
class Source:
    """A pinned object to read: by ETag, and by `version_id` if the bucket keeps versions."""

    bucket: str
    key: str
    etag: str
    num_bytes: int
    version_id: str | None = None


@dataclass(frozen=True, slots=True)
class BatchError:
    """One entry of a Batch's `errors`; `line` counts from 1, including blank lines."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a batch.

    No line starts once the GPU time has cost `max_cost`, in the deployment's currency.
    Result files expire `output_expires_seconds` after their creation, if that is set.
    With `strict_parameters` a file with unknown parameters is rejected. `recipe` has the keys of a
    table's recipe from the user metadata of an upload, as text; `table_recipe` has those of an API
    request, as JSON. The model `escalate` answers rows with an answer whose confidence is lower
    than `escalate_below`, or than the threshold that gives the others `target_accuracy`, in the way
    `escalate_by`. Batches of a tenant with a lower `priority` run first; None is its recipe's.
    Rows have the `echo_fields` of their lines.
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
    table_recipe: str | None = None
    escalate: str | None = None
    escalate_below: float | None = None
    target_accuracy: float | None = None
    escalate_by: EscalateBy = "decision"
    priority: int | None = None
    echo_fields: tuple[str, ...] = ()


def is_priority(value: object) -> TypeGuard[int]:
    """Say whether a value is a priority of a batch."""
    return type(value) is int and -MAX_PRIORITY <= value <= MAX_PRIORITY


def is_share(value: object) -> TypeGuard[float]:
    """Return whether a value is a number above 0 and at most 1."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


@dataclass(frozen=True, slots=True)
class Retry:
    """Selects the requests of the batch `of` that did not succeed, and edits them.

    Requests that were refused as invalid are among them with `include_invalid`. `body` is a merge
    patch of their bodies, as JSON, and `prompt` replaces the prompt of a table's recipe.
    """

    of: str
    include_invalid: bool = False
    body: str | None = None
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class Outputs:
    """Object keys of a batch's results, all in its own bucket; `table_key` is set for tables."""

    output_key: str
    error_key: str
    report_key: str
    table_key: str | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Model revision and engine version that computed the rows, for the report.

    Rows of a model that `labels_spans`, a token classifier, have their own column in a table.
    """

    model_revision: str | None = None
    engine_version: str | None = None
    labels_spans: bool = False


@dataclass(frozen=True, slots=True)
class Conversion:
    """Conversion of an input to plain JSONL, by the multipart upload `upload`.

    `num_vain` counts consecutive runs without progress. `recipe` has the keys of a table's recipe,
    as JSON.
    """

    form: FileFormat
    upload: str
    num_vain: int = 0
    recipe: str | None = None


@dataclass(frozen=True, slots=True)
class WebhookTry:
    """One attempt to call a webhook: the HTTP status of the response, if any, or the error."""

    at: int
    status_code: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Reason why no shard of a batch starts before `until`, and since when (Unix seconds)."""

    code: str
    message: str
    since: int
    until: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One file being run; changed only by `moved` and conditional writes.

    Times are Unix seconds, except `created_ns`, which orders the batches of one second.
    `outcome` is the status after `finalizing`. `conversion` is the progress of converting a file to
    plain JSONL. `failing_since` is the first dead-lettered message since intake last progressed,
    and `failures` counts its failed runs. `source` is the JSONL that shards are ranges of: the
    input, or the converted input, whose source is then `original`. `predecessor` is the batch of
    the same name that this one replaced; its output is published first. `table_tries` counts the
    runs that have started to write its table or to merge its rows, and `questions` are the
    distributions of the answers in the table, as JSON. Deliveries to URLs are `delivered` or
    `failed`, after a number of tries. `queued_lines` count against the tenant's limit.
    The end is reported to a webhook at `webhook_host`, whose next try is due at `webhook_due`.
    `turn` is the
    Lambda run that owns the batch, and `turn_until` when the newest one ended or must end;
    `ended_at` is the chosen end. `seen` is what the reaper saw, and `seen_at` since when
    it is unchanged. From `expires` on the table may delete it, long after `expires_at`; None means
    never, also for everything that belongs to a batch. From `erasing_at` on clients see only its
    tombstone, and at `erased_at` nothing else is left. `escalation` names a second model, if any.
    `retry` selects the lines of another batch's input, and `merge` is the outcome of merging its
    rows into that batch's results. `retried_by` is the newest retry of this batch.
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
    questions: str | None = None
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
    escalation: Escalation | None = None
    retry: Retry | None = None
    retried_by: str | None = None
    merge: Literal["done", "failed"] | None = None

    def model_of(self, *, is_escalated: bool) -> str:
        """Return the model whose workers run its shards: the first one's, or the escalated ones."""
        if is_escalated and self.escalation is not None:
            return self.escalation.model
        return self.model or ""

    @property
    def priority(self) -> int:
        """Return its place among its tenant's batches: the lowest number runs first."""
        return self.options.priority or 0

    @property
    def awaits_threshold(self) -> bool:
        """Return whether its first model must answer all rows before any is escalated."""
        return self.escalation is not None and self.escalation.is_waiting

    @property
    def is_terminal(self) -> bool:
        """Say whether the batch has reached a final status."""
        return self.status in TERMINAL

    @property
    def end_at(self) -> int | None:
        """The time of its end; None before."""
        if not self.is_terminal:
            return None
        at: int | None = getattr(self, f"{self.status}_at")
        return self.ended_at or at

    @property
    def has_cost_all(self) -> bool:
        """Say whether it is winding up because it has reached its cost limit."""
        return any(error.code == MAX_COST_REACHED for error in self.errors)

    @property
    def tombstone(self) -> Batch:
        """Return the remains of an erased batch: IDs, times and counts, none of the client's text.

        It has no options, no errors and no file names.
        """
        window = self.options.completion_window
        retained = {name: getattr(self, name) for name in _KEPT}
        nothing = Source(self.source.bucket, "", "", 0)
        return Batch(
            **retained,
            source=nothing,
            input_file_id="",
            options=Options(completion_window=window),
            outputs=Outputs("", "", ""),
        )

    def pause_at(self, now: float) -> Pause | None:
        """Return the reason why no shard of it starts now; None if shards do start."""
        return self.pause if self.pause is not None and now < self.pause.until else None

    @property
    def input(self) -> Source:
        """Return the uploaded input."""
        return self.original or self.source

    @property
    def vendor(self) -> Vendor | None:
        """The form of its input; None for OpenAI's."""
        return None if self.conversion is None else self.conversion.form.vendor

    @property
    def is_table(self) -> bool:
        """Say whether the input is a table; retries run requests of one, and get no table."""
        is_converted = self.conversion is not None and self.conversion.recipe is not None
        return is_converted and self.retry is None

    @property
    def is_table_due(self) -> bool:
        """Say whether its rows are published and still need to be written as a table.

        Cancelled batches never get a table.
        """
        has_rows = self.output_file_id is not None or self.error_file_id is not None
        is_missing = self.outputs.table_key is not None and self.table_file_id is None
        return self.status is Status.FINALIZING and has_rows and is_missing

    @property
    def is_merge_due(self) -> bool:
        """Say whether its rows are published and still need to be merged into the retried batch."""
        has_rows = self.output_file_id is not None or self.error_file_id is not None
        is_winding_up = self.status in {Status.FINALIZING, Status.CANCELLING}
        return self.retry is not None and self.merge is None and has_rows and is_winding_up

    @property
    def winds_up_since(self) -> int | None:
        """The time since which it is finalizing or cancelling; None before that."""
        return self.finalizing_at or self.cancelling_at

    def moved(self, status: Status, now: int) -> Batch:
        """Return the batch in another status; raises InvalidMove for an invalid transition."""
        check_move(self.status, status)
        changes: dict[str, Any] = {"status": status, f"{status}_at": now}
        return replace(self, **changes)


# The fields that an erased batch keeps.
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
    """`done` shards are sealed and never change; the lease says whether a pending one runs."""

    PENDING = "pending"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Shard:
    """A contiguous range of lines, bytes `start` to `end` (exclusive) of the input.

    `first_line` is the number of the line at `start`, including blank lines. `num_rows` counts the
    lines that are not blank, and `expected` has their tokens. `attempts` counts claims since rows
    were last made durable. `suspects` are groups of lines that ran when an engine died,
    `quarantined` those that killed it again alone. `output_sizes` and `error_sizes` are the sizes
    of the segments sealed under `fence`. `abandoned` is why the remaining lines were given up. A
    shard that `is_escalated` waits for the batch's second model, or is run by it.
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
    progress: Progress = NO_PROGRESS
    suspects: tuple[tuple[int, ...], ...] = ()
    quarantined: tuple[int, ...] = ()
    output_sizes: tuple[int, ...] = ()
    error_sizes: tuple[int, ...] = ()
    abandoned: str | None = None
    expires: int | None = None
    expected: ExpectedTokens = NO_TOKENS
    is_escalated: bool = False

    def is_leased(self, now: float) -> bool:
        """Say whether a worker holds its lease."""
        return self.owner is not None and self.lease_until >= now
