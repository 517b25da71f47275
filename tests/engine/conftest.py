"""Engine tests run tiny models: one thread each is faster than waking a second."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numba
import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
    numba.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> None:
    """Keep Triton's interpreter from replacing again what is replaced: two fifths of its time.

    A launch replaces Triton's language by functions that compute; each call within a kernel has it
    look through the whole language for more.
    """
    if find_spec("triton") is None:  # there is none for this system
        return
    interpreter, language = map(import_module, ("triton.runtime.interpreter", "triton.language"))
    patch_language = interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        used = [it for it in fn.__globals__.values() if it is language or it is language.core]
        is_patched = not any(language.core.is_builtin(it.load) for it in used)
        return None if is_patched else patch_language(fn)

    interpreter._patch_lang = patch_once
