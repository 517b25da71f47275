"""The backend of the page in tests: Lambdas that listen to the queue, and a worker.

The worker's engine does what the body of a line says: `tests/engine_process/scripted_engine.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from localstack.event_source_mapping import EventSourceMapping
from tests.emulators import MODEL
from tests.handler.intake.rig import Cloud, line_of
from tests.handler.worker.rig import Rig
from tidemill.handler.lambdas import control, intake


def file_of(scripts: Sequence[dict[str, Any]]) -> bytes:
    """Return a file of good lines whose bodies say what becomes of them."""
    return b"".join(
        line_of(f"row-{number}", body={"model": MODEL, "messages": [], **script}) + b"\n"
        for number, script in enumerate(scripts, start=1)
    )


@contextmanager
def control_running(cloud: Cloud) -> Iterator[None]:
    """Let the Lambdas answer their queues until the block is left."""
    stop, here = Event(), cloud.deployment
    threads = [
        Thread(target=EventSourceMapping(queue.url, name, handler, 900).run, args=(stop,))
        for queue, name, handler in (
            (here.control, "control", _control),
            (here.drops, "control", _control),
            (here.intake, "intake", intake.handler),
        )
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@contextmanager
def worker_running(cloud: Cloud, folder: Path, *engine: str) -> Iterator[None]:
    """Run a worker until the block is left; `engine` are options of the scripted engine."""
    rig = Rig(cloud.emulator, folder, cloud.deployment, dict(cloud.environment))
    process = rig.start(engine=engine)
    try:
        yield
    finally:
        process.kill()


def _control(event: dict[str, Any], context: Any) -> Any:
    return control.handler(json.loads(json.dumps(event)), context)
