"""Handling of AWS's replies by both drivers, with scripted clients."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from tidemill.handler.aws.aio import AioAws
from tidemill.handler.aws.calls import SERVICES, Call, Operation, translate
from tidemill.handler.aws.sync import Aws
from tidemill.handler.errors import AwsError, ConditionFailed, NotThere, ObjectChanged

CALL = Call("dynamodb", "update_item", {"TableName": "t"})
CONFLICT, CONDITION, NO_REASON, INVALID = (
    {"Code": code}
    for code in ("TransactionConflict", "ConditionalCheckFailed", "None", "ValidationError")
)


def refusal(code: str, message: str = "words", **fields: Any) -> ClientError:
    """Return what a client raises for an answer with this code."""
    return ClientError({"Error": {"Code": code, "Message": message}, **fields}, "UpdateItem")


def cancelled(*reasons: dict[str, str]) -> ClientError:
    """Return what a client raises for a transaction that was not done."""
    return refusal("TransactionCanceledException", CancellationReasons=list(reasons))


class ScriptedClient:
    """Gives the next answer to whatever is called, or raises it."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.num_calls = 0

    def update_item(self, **_: object) -> Any:
        """Answer."""
        self.num_calls += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class ScriptedAioClient(ScriptedClient):
    """The same for a driver that waits."""

    async def update_item(self, **arguments: object) -> Any:
        """Answer."""
        return super().update_item(**arguments)


Drive = Callable[..., tuple[Any, int]]


def drive_sync(operation: Operation[Any], *answers: Any) -> tuple[Any, int]:
    """Return the result or the error of an operation, and how many calls it took."""
    client = ScriptedClient(*answers)
    try:
        result = Aws(lambda *_, **__: client).run(operation)
    except AwsError as exc:
        result = exc
    return result, client.num_calls


def drive_aio(operation: Operation[Any], *answers: Any) -> tuple[Any, int]:
    """Do the same with the other driver."""
    client = ScriptedAioClient(*answers)
    aws = AioAws()
    aws._clients = dict.fromkeys(SERVICES, client)
    try:
        result = asyncio.run(aws.run(operation))
    except AwsError as exc:
        result = exc
    return result, client.num_calls


@pytest.fixture(params=[drive_sync, drive_aio], ids=["boto3", "aiobotocore"])
def drive(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Drive:
    """Both drivers, without the waits between tries."""
    for driver in ("sync", "aio"):
        monkeypatch.setattr(f"tidemill.handler.aws.{driver}.RETRY_DELAYS_SECONDS", (0, 0))
    found: Drive = request.param
    return found


def one_call() -> Operation[Any]:
    """Make one call and return what comes."""
    return (yield CALL)


@pytest.mark.parametrize(
    "conflict",
    [
        cancelled(CONFLICT, NO_REASON),
        cancelled(NO_REASON, {"Code": "ThrottlingError"}),
        cancelled({"Code": "ProvisionedThroughputExceeded"}, NO_REASON),
        refusal("TransactionConflictException"),
    ],
    ids=["conflict", "throttled", "throughput", "write"],
)
def test_what_meets_a_transaction_or_is_throttled_in_one_is_sent_again(
    drive: Drive, conflict: ClientError
) -> None:
    """Nothing was done, so a transaction, or a single write outside one, is simply sent again."""
    assert drive(one_call(), conflict, conflict, {"Attributes": {}}) == ({"Attributes": {}}, 3)


def test_a_conflict_that_stays_is_an_error(drive: Drive) -> None:
    """It is raised after the last try, with AWS's own code."""
    error, num_calls = drive(one_call(), cancelled(CONFLICT))
    assert (error.aws_code, num_calls) == ("TransactionCanceledException", 3)


@pytest.mark.parametrize("other", [CONFLICT, {"Code": "ThrottlingError"}])
def test_a_failed_condition_is_not_sent_again(drive: Drive, other: dict[str, str]) -> None:
    """It is not sent again even if another part met a conflict: it would fail again."""
    error, num_calls = drive(one_call(), cancelled(other, CONDITION))
    assert isinstance(error, ConditionFailed)
    assert num_calls == 1


def test_a_transaction_that_can_never_be_is_not_sent_again(drive: Drive) -> None:
    """An error in the request itself is permanent."""
    error, num_calls = drive(one_call(), cancelled(INVALID, NO_REASON))
    assert (error.aws_code, num_calls) == ("TransactionCanceledException", 1)


def test_those_who_met_once_wait_differently_long(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait is near the one that is due, and no two are alike."""
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    for driver in ("sync", "aio"):
        monkeypatch.setattr(f"tidemill.handler.aws.{driver}.RETRY_DELAYS_SECONDS", (1.0,) * 20)
    monkeypatch.setattr("tidemill.handler.aws.sync.time.sleep", waits.append)
    monkeypatch.setattr("tidemill.handler.aws.aio.asyncio.sleep", note)
    drive(one_call(), cancelled(CONFLICT))
    assert len(set(waits)) == 20
    assert 0.5 <= min(waits) < max(waits) <= 1.5


def test_a_call_may_wait_before_it_is_sent(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits about as long as it specifies; without a delay it is sent at once."""
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    def late() -> Operation[Any]:
        yield CALL
        return (yield replace(CALL, delay_seconds=4.0))

    monkeypatch.setattr("tidemill.handler.aws.sync.time.sleep", waits.append)
    monkeypatch.setattr("tidemill.handler.aws.aio.asyncio.sleep", note)
    assert drive(late(), {}, {"Attributes": {}}) == ({"Attributes": {}}, 2)
    [waited] = waits
    assert 2.0 <= waited <= 6.0


def test_an_operation_may_handle_a_refusal_and_go_on(drive: Drive) -> None:
    """The refusal is thrown to where it called; the next call and the result count."""

    def patient() -> Operation[str]:
        try:
            yield CALL
        except ConditionFailed as exc:
            response = yield CALL
            return f"{response['words']} after {exc.item}"
        return "never"

    item = {"fence": {"N": "3"}}
    lost = refusal("ConditionalCheckFailedException", Item=item)
    assert drive(patient(), lost, {"words": "done"}) == ("done after {'fence': 3}", 2)


def test_a_client_is_made_when_it_is_needed_and_once() -> None:
    """A Lambda that reads one item does not wait for the clients of five services."""
    made: list[tuple[str, dict[str, Any]]] = []

    def make(service: str, config: Any) -> ScriptedClient:
        made.append((service, config.retries))
        return ScriptedClient({})

    aws = Aws(make)
    aws.run(one_call())
    aws.run(one_call())
    assert made == [("dynamodb", {"mode": "standard", "total_max_attempts": 6})]
    assert set(aws.clients) == set(SERVICES)
    assert aws.clients["ecs"] is aws.clients["ecs"]
    assert made[1:] == [("ecs", {"mode": "standard", "total_max_attempts": 3})]


def test_an_operation_without_calls_returns_at_once(drive: Drive) -> None:
    """Nothing is sent for what is known already."""

    def known() -> Operation[int]:
        if CALL.service == "s3":
            yield CALL
        return 7

    assert drive(known(), {}) == (7, 0)


def test_a_body_is_read_whole() -> None:
    """An operation gets bytes, never a stream."""
    assert drive_sync(one_call(), {"Body": io.BytesIO(b"abc")}) == ({"Body": b"abc"}, 1)


def test_a_body_that_breaks_off_is_an_error() -> None:
    """The error is not an exception of the HTTP library."""
    error, _ = drive_aio(one_call(), TimeoutError("slow"))
    assert isinstance(error, AwsError)
    assert "dynamodb update_item" in str(error)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("NoSuchKey", NotThere),
        ("NoSuchVersion", NotThere),
        ("NoSuchUpload", NotThere),
        ("404", NotThere),
        ("AWS.SimpleQueueService.NonExistentQueue", NotThere),
        ("ReceiptHandleIsInvalid", NotThere),
        ("MessageNotInflight", NotThere),
        ("AWS.SimpleQueueService.MessageNotInflight", NotThere),
        ("412", ObjectChanged),
        ("PreconditionFailed", ObjectChanged),
        ("ConditionalCheckFailedException", ConditionFailed),
        ("AccessDenied", AwsError),
        ("ValidationException", AwsError),
        ("InvalidParameterValue", AwsError),
    ],
)
def test_codes_of_aws_have_one_meaning_each(code: str, kind: type[AwsError]) -> None:
    """Operations see what happened, and the code for the log."""
    error = translate(refusal(code), CALL)
    assert type(error) is kind
    assert error.aws_code == code


@pytest.mark.parametrize(
    ("name", "reason", "kind"),
    [
        ("ReceiptHandle", "Message does not exist or is not available", NotThere),
        ("VisibilityTimeout", "Total VisibilityTimeout is beyond the limit", NotThere),
        ("VisibilityTimeout", "Must be between 0 and 43200", AwsError),
        ("DelaySeconds", "Must be between 0 and 900", AwsError),
    ],
)
def test_only_a_message_that_is_no_longer_ours_is_gone(
    name: str, reason: str, kind: type[AwsError]
) -> None:
    """SQS has one code for that and for a value that is a mistake of ours."""
    message = f"Value 1 for parameter {name} is invalid. Reason: {reason}."
    assert type(translate(refusal("InvalidParameterValue", message), CALL)) is kind


def test_an_endpoint_that_cannot_be_reached_is_an_error() -> None:
    """Named after botocore's exception, which has no code."""
    error = translate(EndpointConnectionError(endpoint_url="http://nowhere"), CALL)
    assert type(error) is AwsError
    assert error.aws_code == "EndpointConnectionError"
