"""What the GPU's kernels take of a card: registers, shared memory, and what is spilled.

    python -m bench.kernel_table [--write docs/kernels.md]

Compiles what the hot models ask for, in bf16 and for the architectures named below, without a card,
and reads it off the machine code. Whoever changes a kernel or a choice writes the table again.
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

from engine.kernels.triton.launching import compiling_for
from engine.model.beforehand import USUAL, run, without_memory

ARCHITECTURES = (80, 90)
HOT = ("Llama-3-8B", "Qwen3-0.6B")
USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
PAGE = """# The GPU's kernels

What each takes of a multiprocessor where it is hot: in bf16, for the shapes of {models}. Registers
are those of one thread (255 is the most), shared memory is in bytes of one program; bytes spilled
are those of one thread, which live in slow memory, and there should be none. A slash stands between
{architectures}. `python -m bench.kernel_table --write docs/kernels.md` makes this page, by Triton
{version}, without a card; what the kernels do on one is in [performance.md](performance.md).

| kernel | constants | warps | stages | registers | shared memory | spilled |
|---|---|---|---|---|---|---|
{rows}
"""


@dataclass(frozen=True, slots=True, order=True)
class Compiled:
    """A kernel as it was compiled once; variants that differ in no constant are one."""

    kernel: str
    constants: str
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What one architecture's machine code takes; of variants the most."""

    registers: int
    shared: int
    spilled: int


Table = dict[Compiled, dict[int, Usage]]


def compile_hot(models: Iterable[str] = HOT, architectures: Iterable[int] = ARCHITECTURES) -> Table:
    """Compile what these models ask for and return what each kernel takes."""
    table: Table = {}

    def tell(*, src: Any, metadata: Any, metadata_group: dict[str, str], **_: object) -> None:
        """Take in a kernel; as Triton tells of each that it has compiled or found."""
        arch = metadata["target"].arch
        constants = {src.fn.arg_names[path[0]]: value for path, value in src.constants.items()}
        key = Compiled(
            src.fn.__name__.removeprefix("_"),
            ", ".join(f"{name} {_said(value)}" for name, value in sorted(constants.items())),
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
        knobs.compilation.listener = tell
        for arch in architectures:
            with compiling_for(arch):
                for model in models:
                    run(USUAL[model], torch.bfloat16)
    return table


def usage_of(files: dict[str, str], shared: int) -> Usage:
    """Return what the machine code among these files takes."""
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


def page(table: Table, models: Sequence[str] = HOT) -> str:
    """Return the page that shows the table."""
    architectures = sorted({arch for usages in table.values() for arch in usages})
    return PAGE.format(
        models=" and ".join(models),
        architectures=" and ".join(f"sm_{arch}" for arch in architectures),
        version=triton.__version__,
        rows="\n".join(_row(key, table[key]) for key in sorted(table)),
    )


def _row(key: Compiled, usages: dict[int, Usage]) -> str:
    columns = [
        " / ".join(f"{getattr(usages[arch], name):,}" for arch in sorted(usages))
        for name in ("registers", "shared", "spilled")
    ]
    numbers = (str(number) for number in (key.num_warps, key.num_stages))
    return f"| {' | '.join((f'`{key.kernel}`', key.constants, *numbers, *columns))} |"


def _said(value: Any) -> str:
    return str(value.__name__ if callable(value) else value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page, or write it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args(arguments)
    table = compile_hot()
    text = page(table)
    if asked.write is None:
        sys.stdout.write(text)
    else:
        asked.write.write_text(text, encoding="utf-8")
    spilled = {key for key, usages in table.items() if any(it.spilled for it in usages.values())}
    for key in sorted(spilled):
        sys.stderr.write(f"{key.kernel} spills: {key}\n")
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
