"""Runs operations with boto3, for Lambdas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import IO, Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tidemill.net.backoff import with_jitter

from ..errors import AwsError
from .calls import (
    RETRY_DELAYS_SECONDS,
    SERVICES,
    Call,
    Operation,
    Service,
    T,
    client_options,
    is_retryable,
    region,
    translate,
)
from .s3_store import find_store

MAX_PRESIGNED_SECONDS = 3600
_NUM_THREADS = 16


def aws_client(service: str, *, config: Config | None = None, **options: Any) -> Any:
    """Return a client with the caller's AWS settings, in the configured region.

    The S3 client is for the configured store, which may not be AWS's.
    """
    if service != "s3":
        return boto3.client(  # noqa: TID251 - here
            service, **{"region_name": region(), "config": config, **options}
        )
    store = find_store()
    session = boto3.Session(profile_name=store.profile) if store.profile else boto3
    config = (config or Config()).merge(Config(**store.client_options))
    region_name = store.region or region()
    client = session.client("s3", **{"region_name": region_name, "config": config, **options})
    store.prepare(client)
    return client


class Clients(Mapping[Service, Any]):
    """The client of each service, created on first use: no start pays for the others."""

    def __init__(self, make_client: Callable[..., Any]) -> None:
        self._make_client = make_client
        self._made: dict[Service, Any] = {}
        self._making = Lock()

    def __getitem__(self, service: Service) -> Any:
        with self._making:
            if service not in self._made:
                config = Config(**client_options(service))
                self._made[service] = self._make_client(service, config=config)
            return self._made[service]

    def __iter__(self) -> Iterator[Service]:
        return iter(SERVICES)

    def __len__(self) -> int:
        return len(SERVICES)


class WaitClock:
    """Time spent waiting; concurrent waits of several threads count once.

    Each waiting thread enters it; `seconds` grows when the last one leaves.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._num_waiting = 0
        self._since = 0.0
        self._changing = Lock()

    def __enter__(self) -> None:
        with self._changing:
            if not self._num_waiting:
                self._since = time.perf_counter()
            self._num_waiting += 1

    def __exit__(self, *_: object) -> None:
        with self._changing:
            self._num_waiting -= 1
            if not self._num_waiting:
                self.seconds += time.perf_counter() - self._since


class Aws:
    """Runs operations, one call after the other; thread-safe.

    `waiting` measures for how long at least one call has been under way.
    """

    def __init__(self, make_client: Callable[..., Any] = aws_client) -> None:
        self.clients: Mapping[Service, Any] = Clients(make_client)
        self.waiting = WaitClock()

    def run(self, operation: Operation[T]) -> T:
        """Return the operation's result; raises an AwsError that it does not handle itself."""
        try:
            call = next(operation)
            while True:
                try:
                    with self.waiting:
                        response = self._send(call)
                except (ClientError, BotoCoreError) as exc:
                    call = operation.throw(translate(exc, call))
                except AwsError as exc:  # of a client that is not boto3's
                    call = operation.throw(exc)
                else:
                    call = operation.send(response)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def run_all(self, operations: Iterable[Operation[T]]) -> list[T]:
        """Run operations concurrently; return the results in order, or raise the first failure."""
        waiting = list(operations)
        if len(waiting) < 2:
            return [self.run(operation) for operation in waiting]
        with ThreadPoolExecutor(min(_NUM_THREADS, len(waiting))) as pool:
            return list(pool.map(self.run, waiting))

    def open(self, **pin: Any) -> IO[bytes]:
        """Return the body of an object as a stream; `pin` are arguments of `get_object`.

        Raises AwsError; errors within the stream are botocore's own.
        """
        call = Call("s3", "get_object", pin)
        try:
            body: IO[bytes] = self.clients["s3"].get_object(**pin)["Body"]
        except (ClientError, BotoCoreError) as exc:
            raise translate(exc, call) from exc
        return body

    def presign(self, call: Call, expires_seconds: int) -> str:
        """Return a presigned URL for a call to S3, valid for an hour at most.

        It expires with the credentials that sign it, so it is created per reply and never stored.
        """
        assert call.service == "s3"
        assert 0 < expires_seconds <= MAX_PRESIGNED_SECONDS
        url: str = self.clients["s3"].generate_presigned_url(
            call.method, Params=dict(call.arguments), ExpiresIn=expires_seconds
        )
        return url

    def _send(self, call: Call) -> Any:
        send = getattr(self.clients[call.service], call.method)
        if call.delay_seconds:
            time.sleep(with_jitter(call.delay_seconds))
        for delay_seconds in RETRY_DELAYS_SECONDS:
            try:
                response = send(**call.arguments)
                break
            except ClientError as exc:
                if not is_retryable(exc):
                    raise
            time.sleep(with_jitter(delay_seconds))
        else:
            response = send(**call.arguments)
        if "Body" in response:
            response["Body"] = response["Body"].read()
        return response
