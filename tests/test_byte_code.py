"""Byte code that is written before a distributed run."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from _pytest.assertion import rewrite

from tests.byte_code import find_test_files, write_byte_code


def test_pytest_imports_the_byte_code_that_was_written(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process rewrites a file's assertions again, until the file changes."""
    file = tmp_path / "folder/test_it.py"
    file.parent.mkdir()
    hook = rewrite.AssertionRewritingHook(pytestconfig)

    def number() -> Any:
        spec = spec_from_file_location("test_it", file, loader=hook)
        assert spec is not None
        module = module_from_spec(spec)
        with monkeypatch.context() as patch:
            patch.setattr(rewrite, "_rewrite_test", pytest.fail)
            hook.exec_module(module)
        return module.number

    for value in (1, 22):  # of other lengths: pytest compares times in whole seconds
        file.write_text(f"number = {value}\nassert number\n")
        write_byte_code([file], pytestconfig)
        assert number() == value


def test_a_file_with_an_error_is_left_to_the_collection(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """The run starts, and pytest reports the file."""
    broken = tmp_path / "test_broken.py"
    broken.write_text("def\n")
    write_byte_code([broken, tmp_path / "test_missing.py"], pytestconfig)
    assert list(tmp_path.rglob("*.pyc")) == []


@pytest.mark.parametrize("name", ["assertstate_key", "get_cache_dir", "_rewrite_test"])
def test_another_version_of_pytest_writes_its_byte_code_itself(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The run starts without the internals, and without the plugin that rewrites assertions."""
    file = tmp_path / "test_it.py"
    file.write_text("number = 1\n")
    monkeypatch.delattr(rewrite, name)
    write_byte_code([file], pytestconfig)
    plain = SimpleNamespace(stash=pytest.Stash())
    monkeypatch.undo()
    write_byte_code([file], cast("pytest.Config", plain))
    assert list(tmp_path.rglob("*.pyc")) == []


def test_files_are_those_of_the_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder has test files below it; a test is in its file. Tracebacks have whole paths."""
    monkeypatch.chdir(tmp_path)
    names = ["a/test_b.py", "a/c/test_d.py", "a/conftest.py", "test_e.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = find_test_files(["a", f"{tmp_path}/test_e.py::test_x"])
    assert {str(path.relative_to(tmp_path)) for path in found} == set(names) - {"a/conftest.py"}
