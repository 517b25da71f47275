"""Launches of compiled kernels without Triton's own call, with a stand-in for the launcher."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
from triton.backends.compiler import GPUTarget

from tidemill.engine.kernels.elementwise import Gate
from tidemill.engine.kernels.triton import elementwise
from tidemill.engine.kernels.triton import launch as tested
from tidemill.engine.kernels.triton.launch import launch, launches_none
from tidemill.engine.kernels.triton.tuned_tiles import KernelConfig

CONFIG = KernelConfig({"ROWS": 16}, 4, 2)


class Compiled(SimpleNamespace):
    """A compiled kernel, which can be referred to weakly."""


class Kernel:
    """A kernel that counts the calls through Triton and those of its compiled launcher."""

    arg_names = ("x", "size", "scale", "flag", "WIDTH", "ROWS")
    constexprs = (4, 5)

    def __init__(self, missing: str = "") -> None:
        self.through_triton: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []
        self.compiled: list[ReferenceType[Compiled]] = []
        self._missing = missing

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """Return the call that compiles and launches."""

        def call(*args: Any, **constants: Any) -> Compiled:
            self.through_triton.append((grid, args, constants))
            parts = {"run": self._run, "function": "function", "packed_metadata": "metadata"}
            parts.pop(self._missing, None)
            compiled = Compiled(**parts)
            self.compiled.append(ref(compiled))
            return compiled

        return call

    def _run(self, *args: Any) -> None:
        self.direct.append(args)


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for a device with a stream, and for a known version of Triton."""
    device = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 7)
    monkeypatch.setattr(tested, "driver", SimpleNamespace(active=device))
    monkeypatch.setattr(tested, "JITFunction", Kernel)
    monkeypatch.setattr(tested, "can_call_directly", lambda: True)
    monkeypatch.setattr(tested, "_kept", {})


def run(
    kernel: Kernel,
    x: torch.Tensor | None,
    size: Any,
    scale: float = 0.5,
    config: KernelConfig = CONFIG,
) -> None:
    """Launch a kernel."""
    launch(kernel, (3,), x, size, scale, True, config=config, WIDTH=8)  # noqa: FBT003 - a kernel's argument


def num_calls_of(call: Callable[[], object]) -> int:
    """Return the number of calls of functions, Python's and others, in a call."""
    num_calls = 0

    def record(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return num_calls


def test_later_launches_call_the_compiled_kernel() -> None:
    """Other numbers of the same kind and equal configs share it; constants are in order."""
    kernel, x = Kernel(), torch.zeros(64)
    run(kernel, x, 48)
    run(kernel, x[16:], 32, 0.25, replace(CONFIG))
    assert len(kernel.through_triton) == 1
    hooks = None, None, None
    arguments = x.data_ptr() + 64, 32, 0.25, True, 8, 16
    assert kernel.direct == [(3, 1, 1, 7, "function", "metadata", *hooks, *arguments)]


def test_a_kernel_that_is_called_directly_is_not_collected() -> None:
    """Triton 3.8 and later unload a compiled kernel then."""
    kernel = Kernel()
    run(kernel, torch.zeros(64), 48)
    [compiled] = kernel.compiled
    assert compiled() is not None


@pytest.mark.parametrize(
    ("x", "size"),
    [
        (torch.zeros(64)[1:], 48),
        (torch.zeros(64, dtype=torch.float16), 48),
        (None, 48),
        (torch.zeros(64), 1),
        (torch.zeros(64), 3),
        (torch.zeros(64), 2**31),
        (torch.zeros(64), -(2**31) - 16),
        (torch.zeros(64), 48.0),
    ],
)
def test_another_kind_of_argument_is_compiled(x: torch.Tensor | None, size: Any) -> None:
    """Triton compiles for dtypes, alignment, the number 1 and a number's width."""
    kernel = Kernel()
    run(kernel, torch.zeros(64), 48)
    run(kernel, x, size)
    assert len(kernel.through_triton) == 2
    assert not kernel.direct


def test_launchers_of_several_kinds_are_kept() -> None:
    """Each is called for its own kinds: dtypes, classes, alignment, and numbers at the limits."""
    kernel, x = Kernel(), torch.zeros(64)
    tensors = None, x, x[1:], x.half(), x.bool(), torch.nn.Parameter(x)
    sizes = 1, 0, 3, 16, -(2**31), 2**31 - 1, 2**31, 2**31 + 1, 2**62, True, 0.5
    grids = (3,), (3, 2), (3, 2, 1)
    every = [(grid, x, size) for grid in grids for x in tensors for size in sizes]
    for _ in range(2):
        for grid, pointer, size in every:
            launch(kernel, grid, pointer, size, 0.5, True, config=CONFIG, WIDTH=8)  # noqa: FBT003
    num_unaligned = len(grids) * len(sizes)
    num_kinds = len(grids) * (len(tensors) - 1) * 7  # 0, 16 and -(2**31) are of one, for example
    assert len(kernel.through_triton) == num_kinds + 2 * num_unaligned
    assert len(kernel.direct) == 2 * len(every) - len(kernel.through_triton)
    whole = [(*grid, 1, 1)[:3] for grid, _, _ in every]
    assert {args[:3] for args in kernel.direct} == set(whole)


def test_a_launch_costs_few_calls() -> None:
    """One for each pointer, and few others: the device may be faster than the host."""
    kernel, x = Kernel(), torch.zeros(64)
    run(kernel, x, 48)
    num_calls = num_calls_of(partial(run, kernel, x, 48))
    assert len(kernel.direct) == 1
    assert num_calls <= 15


def test_constants_by_position_are_launched_by_triton() -> None:
    """Triton compiles another kernel for each value, for example of a weight's groups."""
    kernel, x = Kernel(), torch.zeros(64)
    for width in (2, 4, 2):
        launch(kernel, (3,), x, 48, 0.5, True, width, config=CONFIG)  # noqa: FBT003
    assert len(kernel.through_triton) == 3
    assert not kernel.direct


@pytest.mark.parametrize("missing", ["run", "function", "packed_metadata"])
def test_unknown_parts_are_launched_by_triton(missing: str) -> None:
    """Another version of Triton may have other names; types without a known key go there, too."""
    for kernel, size in ((Kernel(missing), 48), (Kernel(), torch.Size([1]))):
        run(kernel, torch.zeros(64), size)
        run(kernel, torch.zeros(64), size)
        assert len(kernel.through_triton) == 2
        assert not kernel.direct


@pytest.mark.parametrize(
    ("version", "is_known"),
    [("3.6.0", False), ("3.7.1", True), ("3.8.0", True), ("3.9.0", True), ("3.10.0", False)],
)
def test_only_known_versions_are_called_directly(
    version: str, monkeypatch: pytest.MonkeyPatch, *, is_known: bool
) -> None:
    """Others launch through Triton, as does the interpreter."""
    monkeypatch.undo()
    monkeypatch.setattr(tested.triton, "__version__", version)
    monkeypatch.setattr(tested.knobs.runtime, "interpret", False)
    assert tested.can_call_directly.__wrapped__() is is_known


def test_a_layers_norm_and_gate_cost_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two dimensions are not viewed: a view takes as long as a launch."""
    x, weight, num_launches = torch.zeros(3, 8), torch.zeros(8), 0

    def count(*_: object, **__: object) -> None:
        nonlocal num_launches
        num_launches += 1

    monkeypatch.setattr(elementwise, "launch", count)
    gate = Gate("silu")
    for call, most in (
        (partial(elementwise.add_rms_norm, x, x, weight, 1e-6), 12),
        (partial(elementwise.act_and_mul, x, gate), 9),
    ):
        call()
        assert num_calls_of(call) <= most
    assert num_launches == 4
    assert elementwise.act_and_mul(x[None], gate).shape == (1, 3, 4)
    assert elementwise.rms_norm(x[None], weight, 1e-6).shape == (1, 3, 8)


def test_a_launch_without_programs_is_only_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention prepares nothing for a step without wide tiles."""
    assert launches_none(0)
    assert not launches_none(1)
    monkeypatch.setattr(tested, "_compiled_for", GPUTarget("cuda", 90, 32))
    assert not launches_none(0)
