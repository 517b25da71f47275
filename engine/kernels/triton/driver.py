"""Triton's launcher module in C, through which it calls the CUDA driver: checked and precompiled.

Triton compiles it at first use, with a C compiler and Python's headers, which an image lacks, so
the image contains it prebuilt. Compiling needs no driver, only a stub library of the same name.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import triton
from triton import knobs
from triton.runtime import driver

LIBRARY = "libcuda.so.1"


def launch_problem() -> str | None:
    """Return why kernels cannot be launched, with a remedy; None if they can.

    It loads the launcher module, and compiles it if it is missing.
    """
    try:
        _ = driver.active
    except subprocess.CalledProcessError:
        return (
            "the C compiler cannot compile Triton's driver module, because headers are missing: "
            "install libc6-dev (and python3-dev for the system's Python)"
        )
    except RuntimeError as exc:
        if "C compiler" not in str(exc):
            return str(exc)
        return "Triton requires a C compiler, but none was found: install gcc, or set CC"
    except (AssertionError, ImportError, OSError) as exc:
        return f"the NVIDIA driver's {LIBRARY} cannot be loaded ({exc}): install the driver"
    return None


def compile_module() -> None:
    """Compile the launcher module without a driver, into the compile cache."""
    from triton.backends.nvidia import driver as nvidia

    with tempfile.TemporaryDirectory() as folder, knobs.nvidia.scope():
        knobs.nvidia.libcuda_path = folder
        library = make_stub_library(Path(folder))
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)  # Triton loads the module once compiled
        nvidia.library_dirs.cache_clear()
        nvidia.libcuda_dirs.cache_clear()
        nvidia.CudaUtils()


def make_stub_library(folder: Path, body: str = "return 0;") -> Path:
    """Build a stub of the driver's library; each function that the module calls does `body`."""
    source = Path(triton.__file__).with_name("backends") / "nvidia/driver.c"
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*\b(?<!_t)", source.read_text(encoding="utf-8"))))
    code = "".join(f"int {name}(void *out) {{ {body} }}\n" for name in names)
    library = folder / LIBRARY
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("no C compiler was found: install gcc, or set CC")
    subprocess.run(  # noqa: S603 - a compiler that is found or named
        [compiler, "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "-xc", "-", "-o", library],
        input=code,
        text=True,
        check=True,
    )
    return library
