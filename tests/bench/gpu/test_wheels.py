"""The list of wheels to carry to a machine with a GPU."""

from __future__ import annotations

from bench.gpu.wheels import CONSTRAINTS, HELD, LEFT_OUT, needed, pinned
from tidemill.offline.extras import MODULES

# Packages by the modules that a run looks for, where they are called otherwise.
PACKAGES = {"PIL": "pillow", "huggingface_hub": "huggingface-hub"}


def test_a_run_finds_all_that_it_looks_for() -> None:
    """Each module is carried, is on such a machine, or is replaced by an empty one."""
    packages = {PACKAGES.get(module, module) for module in MODULES["engine"]}
    assert packages <= needed() | HELD | LEFT_OUT


def test_wheels_are_pinned_as_they_are_everywhere() -> None:
    """Transitive requirements are included; installed packages are not."""
    names = needed()
    assert {"pydantic", "pydantic-core", "llguidance", "rpds-py"} <= names
    assert not names & (HELD | LEFT_OUT)
    assert set(pinned(names)) <= set(CONSTRAINTS.read_text(encoding="utf-8").splitlines())
