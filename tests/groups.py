"""Groups of tests that share a process, and the groups that start first.

A file is a separate group unless it is listed here with others that share something expensive with
it: a deployment, synthesised stacks. The slowest groups come first, so that no process is left
alone with one at the end; the seconds in `make test`'s log show when that changes.

xdist's own group marks have no effect with pytest 9.2, see pytest-dev/pytest-xdist#1386.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Final

from xdist.scheduler import LoadScopeScheduling

GROUPS: Final = (
    ("tests/engine/kernels/triton/test_compile_all.py",),
    ("tests/localstack/test_local.py", "tests/localstack/test_clients.py"),
    ("tests/handler/worker/test_worker.py",),
    ("tests/handler/worker/test_processes.py",),
    ("tests/localstack/test_permissions.py",),
    ("tests/chaos/test_chaos.py",),
    ("tests/container",),
    ("tests/clients",),
    ("tests/handler/dashboard",),
    ("tests/handler/worker/test_faults.py",),
    ("tests/handler/api/test_schemathesis.py",),
    ("tests/offline/engine/test_weights.py",),
    ("tests/bench/gpu/test_gpu.py",),
    ("tests/docs/test_guides.py",),
    ("tests/offline/engine/test_process.py",),
    ("tests/offline/engine/test_warm_start.py",),
    ("tests/engine/model/test_compile_kernels.py",),
    ("tests/engine/kernels/cpu/test_compile_all.py",),
    ("tests/serve",),
    ("tests/infra/test_bundle.py",),
    ("tests/infra",),
    ("tests/handler/finalize/test_finalize.py",),
    ("tests/handler/worker/context/test_figures.py",),
    ("tests/localstack",),
)
_PLACES: Final = {PurePath(name): place for place, names in enumerate(GROUPS) for name in names}


class GroupScheduling(LoadScopeScheduling):
    """Gives each process one group after another, in the order of their tests."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def place_of(nodeid: str) -> int:
    """Return the rank of a test's group; unlisted ones come last."""
    file = _file_of(nodeid)
    return next((_PLACES[each] for each in (file, *file.parents) if each in _PLACES), len(GROUPS))


def group_of(nodeid: str) -> str:
    """Return the name of a test's group."""
    place = place_of(nodeid)
    return GROUPS[place][0] if place < len(GROUPS) else str(_file_of(nodeid))


def _file_of(nodeid: str) -> PurePath:
    return PurePath(nodeid.partition("::")[0])
