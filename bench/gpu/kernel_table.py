"""Resource usage of the GPU's kernels: registers, shared memory, spills.

    python -m bench.gpu.kernel_table [--write PAGE | --check PAGE]
        [--architectures 80,86,89,90] [--models Gemma-2-9B,…|all]

Compiles the kernels of the hot models, in bf16 and for the architectures named below, without a
card, and reads the figures off the machine code. After a change of a kernel or a choice, write the
table again. `--check` lists rows that are missing or no longer match the kernels, constants, warps
and stages; the rest may differ with a compiler's version. The exit status is 1 if it finds such
rows, or if a kernel spills or needs more shared memory than a card has. With `--models` only the
latter is checked, for these models. To try another version of Triton from a separate folder:

    pip install --no-deps --target out/triton-3.8 triton==3.8.0
    PYTHONPATH=out/triton-3.8 python -m bench.gpu.kernel_table --models all
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs

from tidemill.engine.kernels.triton.compile_all import latents, recurrences
from tidemill.engine.kernels.triton.launch import compile_only
from tidemill.engine.model.compile_kernels import (
    QUANTISATIONS,
    Quantise,
    mxfp4_experts,
    run,
    without_memory,
)
from tidemill.engine.model.usual_models import USUAL_MODELS

# Shared memory limit of a program on each, in bytes.
MOST_SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}
HOT = ("Llama-3-8B", "Qwen3-0.6B", "Qwen3-30B-A3B", "gpt-oss-20b")
# The first is also compiled with quantised weights, the second only with mxfp4.
HOT_QUANTISED, HOT_MXFP4 = "Llama-3-8B", "gpt-oss-20b"
USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
PAGE = """# GPU kernels

Resource usage of the hot kernels on a multiprocessor, in bf16, for {models}
(the first also with quantised weights, the last only with mxfp4), for latent attention of
512 numbers (MLA, also with fp8), and for the recurrences of Qwen3-Next, Granite 4 H and Falcon-H1.
Registers (at most 255) and spilled bytes are per thread, shared memory is in bytes per program.
Spilled bytes are in slow memory and should be 0. Slashes separate
{architectures}; a dash means that another tile is chosen.

`python -m bench.gpu.kernel_table --write bench/gpu/kernels.md` generates this page with
Triton {version}, without a GPU. The speed of these kernels is in
[benchmarks](../../docs/explanation/benchmarks.md).

| kernel | constants | warps | stages | registers | shared memory | spilled |
|---|---|---|---|---|---|---|
{rows}
"""


@dataclass(frozen=True, slots=True, order=True)
class Compiled:
    """A kernel as compiled once; variants that differ in no constant are one."""

    kernel: str
    constants: str
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Resource usage of one architecture's machine code; the maximum over its variants."""

    registers: int
    shared: int
    spilled: int


Table = dict[Compiled, dict[int, Usage]]


def compiled(
    models: Iterable[str] = HOT,
    architectures: Iterable[int] = tuple(MOST_SHARED),
    dtype: torch.dtype = torch.bfloat16,
) -> Table:
    """Compile the kernels of these models and return each one's usage."""
    table: Table = {}

    def on_compiled(
        *, src: Any, metadata: Any, metadata_group: dict[str, str], **_: object
    ) -> None:
        """Record a kernel: Triton calls it for each that it has compiled or found in its cache."""
        arch = metadata["target"].arch
        constants = {src.fn.arg_names[path[0]]: value for path, value in src.constants.items()}
        key = Compiled(
            src.fn.__name__.removeprefix("_"),
            ", ".join(filter(None, (_described(*it) for it in sorted(constants.items())))),
            metadata["num_warps"],
            metadata["num_stages"],
        )
        usage, known = usage_of(metadata_group, metadata["shared"]), table.setdefault(key, {})
        before = known.get(arch, usage)
        known[arch] = Usage(
            max(usage.registers, before.registers),
            max(usage.shared, before.shared),
            max(usage.spilled, before.spilled),
        )

    with knobs.compilation.scope(), without_memory():
        knobs.compilation.listener = on_compiled
        for arch in architectures:
            with compile_only(arch):
                for model in models:
                    for quantise in _quantisations(model):
                        run(USUAL_MODELS[model], dtype, quantise=quantise)
                if models == HOT:
                    latents(dtype)
                    recurrences(dtype)
    return table


def _quantisations(model: str) -> Sequence[Quantise | None]:
    if model == HOT_MXFP4:
        return (mxfp4_experts,)
    return (None, *(QUANTISATIONS if model == HOT_QUANTISED else ()))


def usage_of(files: dict[str, str], shared: int) -> Usage:
    """Return the usage of the machine code among these files."""
    [cubin] = [path for name, path in files.items() if name.endswith(".cubin")]
    done = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "-res-usage", cubin],
        capture_output=True,
        text=True,
        check=True,
    )
    found = USAGE.search(done.stdout)
    assert found is not None, done.stdout
    return Usage(int(found[1]), shared, int(found[2]))


def faults(table: Table) -> list[str]:
    """Return kernels that spill, or that need more than any card of an architecture has."""
    return [
        f"{key.kernel} ({key.constants}) on sm_{arch}: {usage}"
        for key, usages in sorted(table.items())
        for arch, usage in usages.items()
        if usage.spilled or usage.shared > MOST_SHARED[arch]
    ]


def page(table: Table) -> str:
    """Return the page that shows the table."""
    return PAGE.format(
        models=", ".join(HOT),
        architectures=", ".join(f"sm_{arch}" for arch in MOST_SHARED),
        version=triton.__version__,
        rows="\n".join(_row(key, table[key]) for key in sorted(table)),
    )


def stale(table: Table, text: str, architectures: Sequence[int]) -> list[str]:
    """Return the rows in which the page differs from a table of some architectures."""
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    places = [list(MOST_SHARED).index(arch) for arch in architectures]
    expected = {
        _beginning(row[:4]) for row in cells if any(row[4].split(" / ")[at] != "–" for at in places)
    }
    return sorted(expected ^ {_beginning(_cells(key)) for key in table})


def _beginning(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(key: Compiled) -> list[str]:
    return [f"`{key.kernel}`", key.constants, str(key.num_warps), str(key.num_stages)]


def _row(key: Compiled, usages: dict[int, Usage]) -> str:
    columns = [
        " / ".join(
            f"{getattr(usages[arch], name):,}" if arch in usages else "–" for arch in MOST_SHARED
        )
        for name in ("registers", "shared", "spilled")
    ]
    return _beginning([*_cells(key), *columns])


def _described(name: str, value: Any) -> str:
    if value is None or value is True:
        return name if value else f"no {name}"
    return "" if value is False else f"{name} {value}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page, or write it; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path)
    parser.add_argument("--check", type=Path)
    parser.add_argument("--architectures", default=",".join(map(str, MOST_SHARED)))
    parser.add_argument("--models", default="")
    options = parser.parse_args(arguments)
    architectures = [int(arch) for arch in options.architectures.split(",")]
    models = (
        USUAL_MODELS if options.models == "all" else tuple(filter(None, options.models.split(",")))
    )
    table = compiled(models or HOT, architectures)
    found = faults(table)
    if models:
        print(f"Triton {triton.__version__}: {len(table)} kernels, {len(found)} faults")
    elif options.check is not None:
        found += stale(table, options.check.read_text(encoding="utf-8"), architectures)
    elif options.write is not None:
        options.write.write_text(page(table), encoding="utf-8")
    else:
        sys.stdout.write(page(table))
    sys.stderr.writelines(f"{fault}\n" for fault in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
