"""All kernels compile for the supported cards, without such a card, and spill nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "engine/kernels/triton"
COMPILE = """
import sys, torch
from tidemill.engine.kernels.triton.compile_all import compile_all
compile_all(int(sys.argv[1]), [getattr(torch, name) for name in sys.argv[2:]])
"""
# All other forms of a kernel are as good as compiled.
ONCE = """
from triton import knobs
met = set()
def is_met(fn, **_):
    name = fn.module, fn.name
    if name in met:
        return True
    met.add(name)
    print(fn.name.rpartition(".")[2])
knobs.runtime.jit_cache_hook = is_met
"""
# A compiled kernel that is called directly is selected by the values of constants by name alone.
BY_NAME = """
from triton.runtime.jit import JITFunction
warmup = JITFunction.warmup
def checked(kernel, *args, **named):
    constants = [kernel.arg_names[place] for place in kernel.constexprs if place < len(args)]
    assert not constants, f"pass {constants} of {kernel.fn.__name__} by name"
    return warmup(kernel, *args, **named)
JITFunction.warmup = checked
"""


def python(folder: Path, *words: str) -> str:
    """Run Python in a separate process, where nothing is interpreted; return its output."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_every_kernel_compiles(pytestconfig: pytest.Config) -> None:
    """Each compiles for Hopper in one form; the test below compiles hot ones for Ampere.

    As there, a kernel is compiled when something of it has changed since the last run. No launch
    passes a constant by position.
    """
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("triton")
    compiled = python(folder, "-c", ONCE + BY_NAME + COMPILE, "90", "bfloat16").split()
    sources = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py"))
    launched = set(re.findall(r"\blaunch\(\s*(?:\*\()?(_\w+)", sources))
    assert set(compiled) == launched
    assert launched <= {path.stem for path in folder.glob("*/*.cubin")}


@pytest.mark.long
@pytest.mark.parametrize("arch", ["80", "89", "90"])
def test_every_form_of_a_kernel_compiles(arch: str, tmp_path: Path) -> None:
    """The dtypes are those of served models."""
    python(tmp_path, "-c", COMPILE, arch, "bfloat16", "float16")


@pytest.mark.long
@pytest.mark.parametrize("arch", ["80", "86", "89", "90"])
def test_hot_kernels_spill_nothing_and_are_reported_correctly(
    arch: str, pytestconfig: pytest.Config
) -> None:
    """bench/gpu/kernels.md contains the kernels, constants and choices of hot models.

    Triton keeps what it compiled by a digest of all that it compiled it from and with: a kernel is
    compiled when something of that has changed.
    """
    assert pytestconfig.cache is not None
    table = (
        "-m",
        "bench.gpu.kernel_table",
        "--check",
        "bench/gpu/kernels.md",
        "--architectures",
        arch,
    )
    assert python(pytestconfig.cache.mkdir("triton"), *table) == ""
