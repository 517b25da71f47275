"""Groups of tests that share a process, and the groups that start first.

A file is a separate group unless it is listed here with others that share something expensive with
it: a deployment, the CDK's process. The slowest groups come first, so that no process is left
alone with one at the end; the seconds in `make test`'s log show when that changes. Groups that
mostly wait (a browser, deployments, killed processes) alternate with groups that compute.

xdist's own group marks have no effect with pytest 9.2, see pytest-dev/pytest-xdist#1386.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import PurePath
from typing import Any, Final

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

GROUPS: Final = (
    ("tests/handler/dashboard",),
    ("tests/localstack/test_local.py", "tests/localstack/test_clients.py"),
    ("tests/infra/test_bundle.py",),
    ("tests/infra", "tests/localstack/test_permissions.py"),
    ("tests/engine/kernels/triton/test_compile_all.py",),
    ("tests/engine/endpoints/decisions/test_probabilities.py",),
    ("tests/docs/test_guides.py",),
    ("tests/test_endpoints.py",),
    ("tests/offline/engine/test_weights.py",),
    ("tests/handler/worker/test_processes.py",),
    ("tests/handler/worker/test_worker.py",),
    ("tests/serve",),
    ("tests/engine/tasks/test_vision.py",),
    ("tests/localstack",),
    ("tests/handler/finalize/test_table.py",),
    ("tests/clients",),
    ("tests/handler/finalize/test_finalize.py",),
    ("tests/handler/worker/test_faults.py",),
    ("tests/handler/finalize/test_publish.py",),
    ("tests/engine_process/test_client.py",),
    ("tests/handler/intake/test_convert.py",),
    ("tests/offline/run/test_hangs.py",),
    ("tests/handler/api/test_schemathesis.py",),
    ("tests/server/test_loop_lag.py",),
    ("tests/handler/worker/context/test_figures.py",),
    ("tests/server/local/test_process.py",),
    ("tests/chaos/test_chaos.py",),
    ("tests/container",),
    ("tests/bench/gpu/test_gpu.py",),
    ("tests/offline/engine/test_process.py",),
    ("tests/offline/engine/test_warm_start.py",),
    ("tests/engine/model/test_compile_kernels.py",),
    ("tests/engine/kernels/cpu/test_compile_all.py",),
)
_PLACES: Final = {PurePath(name): place for place, names in enumerate(GROUPS) for name in names}


class GroupScheduling(LoadScopeScheduling):
    """Gives each process one group after another, in the order of their tests."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        """Keep the tests of a process in a list that finds each at once, among thousands."""
        super().add_node_collection(node, collection)
        if node in self.registered_collections:
            self.registered_collections[node] = _Indexed(collection)


class _Indexed(list[str]):
    def __init__(self, values: Iterable[str]) -> None:
        super().__init__(values)
        self._places = {value: place for place, value in enumerate(self)}

    def index(self, value: str, *_: Any) -> int:
        return self._places[value]


def place_of(nodeid: str) -> int:
    """Return the rank of a test's group; unlisted ones come last."""
    return _place_of_file(nodeid.partition("::")[0])


@cache
def _place_of_file(name: str) -> int:
    file = PurePath(name)
    return next((_PLACES[each] for each in (file, *file.parents) if each in _PLACES), len(GROUPS))


def group_of(nodeid: str) -> str:
    """Return the name of a test's group."""
    return _group_of_file(nodeid.partition("::")[0])


@cache
def _group_of_file(name: str) -> str:
    place = _place_of_file(name)
    return GROUPS[place][0] if place < len(GROUPS) else name
