"""Every operation through both drivers, on each emulator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

from tests.emulators import NAMES, Emulator, deployment_of
from tidemill.handler.aws.aio import AioAws
from tidemill.handler.aws.calls import Operation, T
from tidemill.handler.aws.sync import Aws
from tidemill.handler.deployment import Deployment

_ONCE = {
    "test_a_lost_answer_changes_nothing",
    "test_more_batches_than_one_call_takes_are_all_found",
}
# In these folders one test in four runs with aiobotocore too, and of what a lost answer does.
_SAMPLED = {"stores", "objects"}
_ONE_IN = 4
# On other emulators than the first, one test in three runs.
_ELSEWHERE_ONE_IN = 3


# Before pytest-randomly, so that it chooses the same tests in each order.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most repetitions to `make test-all`.

    Operations know no driver and no emulator: the first one proves all of them with boto3, and a
    share with aiobotocore; the others prove a share with boto3. The worker's tests run aiobotocore
    with nothing else. What a lost answer does, and the most keys of one call, one emulator shows.
    """
    num_seen = num_elsewhere = 0
    for item in items:
        chosen = getattr(item, "callspec", None)
        params = chosen.params if chosen else {}
        name = getattr(item, "originalname", "")
        is_sampled = item.path.parent.name in _SAMPLED or name in _ONCE
        if params.get("run") == "aiobotocore" and is_sampled:
            num_seen += 1
            if num_seen % _ONE_IN:
                item.add_marker(pytest.mark.long)
        if params.get("each_emulator", NAMES[0]) == NAMES[0]:
            continue
        is_once = params.get("run") == "aiobotocore" or name in _ONCE
        num_elsewhere += not is_once
        if is_once or num_elsewhere % _ELSEWHERE_ONE_IN != 1:
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def emulator(each_emulator: Emulator) -> Emulator:
    """Return each emulator in turn, always: what AWS does is known from no single one."""
    return each_emulator


class Run(Protocol):
    """Drives an operation to its result, whichever client is behind it."""

    def __call__(self, operation: Operation[T]) -> T:
        """Return the result; raises what the operation raises."""


def aio_driver(emulator: Emulator) -> Iterator[Run]:
    """Yield a driver that runs operations with aiobotocore in its own thread's event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def wait(make: Callable[[], Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(make(), loop).result(60)

    aws = AioAws()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in emulator.environment.items():
            patch.setenv(name, value)
        wait(aws.__aenter__)
    try:
        yield lambda operation: wait(lambda: aws.run(operation))
    finally:
        wait(lambda: aws.__aexit__(None, None, None))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module", params=["boto3", "aiobotocore"])
def run(request: pytest.FixtureRequest, emulator: Emulator) -> Iterator[Run]:
    """Both drivers in turn."""
    if request.param == "boto3":
        yield Aws(emulator.client).run
    else:
        yield from aio_driver(emulator)


@pytest.fixture(scope="module")
def deployment(emulator: Emulator) -> Deployment:
    """One deployment for a module's tests, each of which creates separate batches."""
    return deployment_of(emulator.create())
