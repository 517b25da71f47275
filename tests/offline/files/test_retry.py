"""--retry-failed runs failed rows again in their places, and a kill at any moment loses no row."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.offline.given import line, rows, wait_for_rows
from tidemill.offline.console.errors import EngineFailed, Refused

Write = Callable[..., Path]

NUM_LINES = 8
# Lines that the engine fails at until it is mended.
FAILING = {1, 2, 5, 7}


class Scene:
    """An input whose lines some engine fails at, its files, and what they come to at the end."""

    def __init__(self, run: Any, write_input: Write, folder: Path, *, has_errors: bool) -> None:
        self.run = run
        self.source = write_input(
            *(line(str(n), name=str(n), say="x" * n) for n in range(NUM_LINES))
        )
        self.out, self.errors = folder / "out", folder / "errors"
        self.paths = [self.out, *([self.errors] if has_errors else [])]
        self.flags = ["-i", self.source, "-o", self.out]
        self.flags += ["-e", self.errors] if has_errors else []
        assert run(*self.flags) == 0
        self.whole = self.out.read_bytes()
        self.fail()

    def fail(self) -> None:
        """Write what a run with a broken engine leaves."""
        for path in self.paths:
            path.unlink(missing_ok=True)
        self.run.fails_at = {str(n) for n in FAILING}
        assert self.run(*self.flags) == 0
        self.run.fails_at = set()
        self.old = [path.read_bytes() for path in self.paths]

    def retry(self, *more: str) -> int:
        """Give the command that mends it."""
        self.run.engine = None
        return int(self.run(*self.flags, "--resume", *more))

    def is_whole(self) -> bool:
        """Return whether the only files are those of a run without failures."""
        left = [path.name for path in self.out.parent.iterdir()]
        return self.out.read_bytes() == self.whole and sorted(left) == ["in.jsonl", "out"]


@pytest.fixture(params=[False, True], ids=["one file", "two files"])
def scene(request: pytest.FixtureRequest, run: Any, write_input: Write, tmp_path: Path) -> Scene:
    """A run with failures, in one file or two."""
    return Scene(run, write_input, tmp_path, has_errors=request.param)


def test_failed_rows_run_again_in_their_places(scene: Scene) -> None:
    """Only they are run, and the files become those of a run without a failure."""
    assert scene.retry("--retry-failed") == 0
    assert scene.run.engine.num_requests == len(FAILING)
    assert scene.is_whole()


def test_a_resume_alone_keeps_failed_rows(scene: Scene) -> None:
    """Failed rows are run again only on request."""
    assert scene.retry() == 0
    assert scene.run.engine is None
    assert [path.read_bytes() for path in scene.paths] == scene.old


def test_what_is_missing_runs_with_what_failed(scene: Scene) -> None:
    """After a kill in the middle, torn rows and all."""
    rng = random.Random(3)
    for _ in range(20):
        scene.fail()
        for path in scene.paths:
            path.write_bytes(path.read_bytes()[: rng.randint(0, 1_500)])
        assert scene.retry("--retry-failed") == 0
        assert scene.is_whole()


def test_what_fails_again_stays_a_failed_row(scene: Scene) -> None:
    """In its place, or in the error file, which is there as long as it has rows."""
    scene.run.fails_at = {"2"}
    assert scene.retry("--retry-failed") == 0
    found = {
        row["custom_id"]: row["response"]["status_code"]
        for path in scene.paths
        for row in rows(path)
    }
    assert found == {str(n): 500 if n == 2 else 200 for n in range(NUM_LINES)}
    assert [row["custom_id"] for row in rows(scene.out)] == [
        str(n) for n in range(NUM_LINES) if n != 2 or scene.paths == [scene.out]
    ]


def test_a_retry_that_is_cut_off_loses_no_row(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    """The old files are unchanged; a resume continues the retry, with or without the flag."""
    scene.run.dies_at = "5"
    with pytest.raises(
        EngineFailed, match=f"{scene.out} stays unchanged until the retry is complete"
    ):
        scene.retry("--retry-failed")
    scene.run.dies_at = None
    assert [path.read_bytes() for path in scene.paths] == scene.old
    capsys.readouterr()
    assert scene.retry() == 0
    assert "continuing an interrupted retry of failed rows" in capsys.readouterr().err
    assert scene.is_whole()


def test_new_files_torn_anywhere_are_gone_on_with(scene: Scene) -> None:
    """A kill may come within a row, and tear each file at another one."""
    scene.run.fails_at = {"2", "7"}
    assert scene.retry("--retry-failed") == 0
    ends = [path.read_bytes() for path in scene.paths]
    rng = random.Random(4)
    for _ in range(12):
        scene.fail()
        scene.run.fails_at = {"2", "7"}
        for path, end in zip(scene.paths, ends, strict=True):
            path.with_name(f"{path.name}.retry").write_bytes(end[: rng.randint(0, len(end))])
        assert scene.retry() == 0
        assert [path.read_bytes() for path in scene.paths] == ends


@pytest.mark.parametrize("num_renames", [0, 1, 2])
def test_a_kill_between_the_two_files_is_settled(
    run: Any, write_input: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_renames: int
) -> None:
    """Whichever has its new name, the next resume gives them theirs, without a model."""
    scene = Scene(run, write_input, tmp_path, has_errors=True)
    replace, renamed = Path.replace, []

    def killed(path: Path, target: Path) -> Path:
        if target.suffix == ".settings":
            return replace(path, target)
        if len(renamed) == num_renames:
            raise KeyboardInterrupt
        renamed.append(path)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        scene.retry("--retry-failed")
    monkeypatch.undo()
    assert scene.errors.read_bytes() == scene.old[1]
    assert scene.retry() == 0
    assert scene.run.engine is None
    assert scene.is_whole()


def test_a_deleted_retry_deletes_no_rows(run: Any, write_input: Write, tmp_path: Path) -> None:
    """New rows of only one of the two files are ignored."""
    scene = Scene(run, write_input, tmp_path, has_errors=True)
    scene.errors.with_name("errors.retry").write_bytes(b"")
    assert scene.retry() == 0
    assert [path.read_bytes() for path in scene.paths] == scene.old
    assert scene.retry("--retry-failed") == 0
    assert scene.is_whole()


def test_starting_over_forgets_a_retry(scene: Scene) -> None:
    """Its rows are not mixed with those of another run."""
    scene.out.with_name("out.retry").write_text("rows\n")
    assert scene.run(*scene.flags, "--force") == 0
    assert scene.is_whole()


def test_a_retry_keeps_link_and_mode(scene: Scene, tmp_path: Path) -> None:
    """The new rows have the old permissions, and a symlink remains one."""
    target = tmp_path / "in a folder" / "target"
    target.parent.mkdir()
    scene.out.rename(target)
    target.chmod(0o640)
    scene.out.symlink_to(target)
    assert scene.retry("--retry-failed") == 0
    assert scene.out.is_symlink()
    assert target.read_bytes() == scene.whole
    assert target.stat().st_mode & 0o777 == 0o640
    assert list(target.parent.iterdir()) == [target]


def test_a_retry_needs_rows_to_retry(scene: Scene) -> None:
    """The flag alone is refused."""
    with pytest.raises(Refused, match="--retry-failed requires --resume"):
        scene.run(*scene.flags, "--retry-failed")


def test_a_retry_has_no_files_before_the_model_is_loaded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill during that time leaves nothing that a later command would continue."""
    load, names = scene.run._load, []

    def load_and_look(*given: Any, **more: Any) -> Any:
        names.extend(path.name for path in scene.out.parent.iterdir())
        return load(*given, **more)

    monkeypatch.setattr(scene.run, "_load", load_and_look)
    assert scene.retry("--retry-failed") == 0
    assert names
    assert not [name for name in names if name.endswith(".retry")]
    assert scene.is_whole()


def test_a_killed_retry_is_completed_to_the_bytes_of_an_unbroken_run(
    spawn: Callable[..., Any], run: Any, write_input: Write, tmp_path: Path
) -> None:
    """kill -9 while it writes."""
    source = write_input(*(line(str(n), name=str(n), wait=0.005) for n in range(60)))
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert run("-i", source, "-o", whole) == 0
    run.fails_at = {str(n) for n in range(60) if n % 3}
    assert run("-i", source, "-o", out) == 0
    before = out.read_bytes()
    flags = ["-i", source, "-o", out, "--resume", "--retry-failed", "--max-inflight", "2"]
    process = spawn(*flags)
    wait_for_rows(tmp_path / "out.retry", 10)
    process.kill()
    process.wait()
    assert out.read_bytes() == before
    run.fails_at = set()
    assert run(*flags) == 0
    assert run.engine.num_requests < 40
    assert out.read_bytes() == whole.read_bytes()


def test_a_retry_that_is_stopped_keeps_rows_that_wait_for_their_order(scene: Scene) -> None:
    """Answered lines after the line at which it stopped are not run again."""
    scene.run.dies_at = "2"
    with pytest.raises(EngineFailed, match="2 finished rows waiting"):
        scene.retry("--retry-failed")
    scene.run.dies_at = None
    assert scene.retry() == 0
    assert scene.run.engine.num_requests == 1
    assert scene.is_whole()


def test_what_a_stopped_run_has_spooled_is_part_of_its_retry(scene: Scene) -> None:
    """Good rows are not run again, failed ones are, in whichever file they are."""
    for path in scene.paths:
        path.unlink()
    scene.run.fails_at, scene.run.dies_at = {"5", "7"}, "3"
    with pytest.raises(EngineFailed):
        scene.run(*scene.flags)
    scene.run.fails_at, scene.run.dies_at = set(), None
    assert scene.retry("--retry-failed") == 0
    assert scene.run.engine.num_requests == 3  # 3 itself, 5 and 7
    assert scene.is_whole()


def test_a_row_that_was_spooled_and_then_written_counts_once(
    run: Any, write_input: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The row is in the spool file of the run and in the files of an interrupted retry."""
    source = write_input(*(line(str(n), name=str(n)) for n in range(20)))
    flags = ["-i", source, "-o", tmp_path / "out"]
    run.fails_at, run.dies_at = {"3", "15"}, "10"
    with pytest.raises(EngineFailed):
        run(*flags)
    run.fails_at, run.dies_at = set(), "15"
    with pytest.raises(EngineFailed):
        run(*flags, "--resume", "--retry-failed")
    assert len(rows(tmp_path / "out.retry")) == 15
    run.dies_at = None
    capsys.readouterr()
    assert run(*flags, "--resume") == 0
    assert "resuming: 19 rows kept" in capsys.readouterr().err
    assert run.engine.num_requests == 1
    assert len(rows(tmp_path / "out")) == 20
