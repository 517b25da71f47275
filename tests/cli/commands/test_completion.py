"""Tests of the shell completion scripts."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tidemill.cli.main import main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is printed for a shell."""
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["res"], {"resume", "results"}),
        (["run", "--resu"], {"--resume"}),
        (["run", "--dtype", "b"], {"bfloat16"}),
        (["keys", ""], {"create", "list", "revoke", "-h", "--help"}),
        (["keys", "create", "--te"], {"--tenant"}),
        (["status", "@"], {"@last"}),
        (["erase", "@"], set()),
        (["run", "-i", "some"], set()),
        (["completion", "z"], {"zsh"}),
    ],
)
def test_bash_completes(
    typed: list[str], offered: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands, their flags, and the values of flags that have some; files otherwise."""
    words = " ".join(f"'{word}'" for word in ("tidemill", *typed))
    call = f"COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _tidemill"
    code = f'{script("bash", capsys)}\n{call}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    process = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert process.stderr == ""
    assert set(process.stdout.split()) == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_what_its_shell_reads(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each names every command; a shell that is here reads it without complaint."""
    printed = script(shell, capsys)
    for word in ("submit", "dtype", "revoke", "bfloat16", "@last"):
        assert word in printed
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=printed, text=True, check=True)
