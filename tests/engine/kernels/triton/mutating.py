"""Kernels with a mistake in them, which the tests of kernels must find."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from _pytest.mark import ParameterSet
from triton.runtime.errors import InterpreterError


class Mutation(NamedTuple):
    """A piece of a module's source, which occurs there once, and its replacement."""

    right: str
    wrong: str


def mutated(module: ModuleType, mutation: Mutation, folder: Path) -> ModuleType:
    """Return the module with the mistake, as a new one in a folder, where Triton can read it."""
    assert module.__file__
    source = Path(module.__file__).read_text()
    assert source.count(mutation.right) == 1, mutation.right
    file = folder / f"{module.__name__.rpartition('.')[2]}.py"
    file.write_text(source.replace(mutation.right, mutation.wrong))
    spec = spec_from_file_location(f"{module.__package__}.mutated_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    sys.modules[made.__name__] = made
    spec.loader.exec_module(made)
    return made


def each_of(mistakes: Mapping[Any, Sequence[Mutation]]) -> list[ParameterSet]:
    """Return each check with each mistake that it must find, named by their numbers."""
    return [
        pytest.param(check, mistake, id=f"{check.__name__}-{number}")
        for check, of_check in mistakes.items()
        for number, mistake in enumerate(of_check)
    ]


def assert_found(
    check: Callable[[ModuleType], None], module: ModuleType, mutation: Mutation, folder: Path
) -> None:
    """Assert that a check passes for the module as it is, and fails with the mistake.

    No kernel may write beyond its tensors: interpreted, it writes to the process' memory.
    """
    _passes(check, module)
    # Memory after a tensor may contain numbers that overflow, about which numpy warns.
    with pytest.raises((AssertionError, InterpreterError)):
        check(mutated(module, mutation, folder))


@cache
def _passes(check: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run the check once for all mistakes."""
    check(module)
