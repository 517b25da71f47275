"""Outputs that fill up, vanish, are held by another run, or are far away."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.long_parameters import with_long
from tests.offline.given import Answer, line, rows, wait_for_rows
from tidemill.offline.console.errors import OutputLost, Refused, TransferFailed
from tidemill.offline.files import http_transfer
from tidemill.offline.files.output import LocalFile

Write = Callable[..., Path]
Spawn = Callable[..., Any]
SECRET = "X-Amz-Signature=0123456789abcdef"


def ids(rows: list[dict[str, Any]]) -> list[str]:
    """Return the custom_id of each row."""
    return [row["custom_id"] for row in rows]


def test_a_local_output_grows_while_the_job_runs(
    spawn: Spawn, write_input: Write, tmp_path: Path
) -> None:
    """Rows in order are there before the job ends; a later row waits for an earlier line."""
    source = write_input(line("a"), line("b"), line("c", wait=60), line("d"))
    out = tmp_path / "out"
    process = spawn("-i", source, "-o", out)
    wait_for_rows(out, 2)
    assert process.poll() is None
    assert ids(rows(out)) == ["a", "b"]


def test_an_old_output_is_there_until_the_model_has_loaded(
    run: Any, write_input: Write, tmp_path: Path
) -> None:
    """Then it is rewritten from scratch, also if it becomes shorter."""
    out = tmp_path / "out"
    out.write_text("old rows\n" * 1_000)
    seen = []
    load = run._load

    def look(*arguments: Any, **given: Any) -> Any:
        seen.append(out.read_text())
        return load(*arguments, **given)

    run._load = look
    assert run("-i", write_input(line("a")), "-o", out, "--force") == 0
    assert seen == ["old rows\n" * 1_000]
    assert ids(rows(out)) == ["a"]


def test_a_symlink_for_an_output_stays_one(run: Any, write_input: Write, tmp_path: Path) -> None:
    """Its target gets the rows and is created if it does not exist."""
    (tmp_path / "link").symlink_to("target")
    assert run("-i", write_input(line("a")), "-o", tmp_path / "link") == 0
    assert (tmp_path / "link").is_symlink()
    assert ids(rows(tmp_path / "target")) == ["a"]


@pytest.mark.parametrize("flag", with_long(["-o"], ["-e"]))
def test_a_second_run_on_one_output_is_refused(
    spawn: Spawn, run: Any, write_input: Write, tmp_path: Path, flag: str
) -> None:
    """The first goes on unharmed, and once it has gone the file is free."""
    source = write_input(line("a"), line("b", wait=60))
    out = tmp_path / "out"
    process = spawn("-i", source, "-o", out, "-e", tmp_path / "errors")
    wait_for_rows(out, 1)
    other = ["-o", tmp_path / "other"] if flag == "-e" else []
    taken = out if flag == "-o" else tmp_path / "errors"
    with pytest.raises(Refused, match=f"another run is writing {taken}"):
        run("-i", source, *other, flag, taken)
    assert ids(rows(out)) == ["a"]
    assert not (tmp_path / "other").exists()
    process.kill()
    process.wait()
    source = write_input(line("c", status=200 if flag == "-o" else 400), line("d"))
    assert run("-i", source, *other, flag, taken, "--force") == 0
    assert ids(rows(taken))[0] == "c"


def test_a_file_that_a_finished_run_removed_is_not_locked(tmp_path: Path) -> None:
    """Many threads open and remove the file; one at a time holds the lock of the current file."""
    path = tmp_path / "out"
    held: list[bool] = []
    lock = threading.Lock()

    def come_and_go() -> None:
        for _ in range(200):
            try:
                file = LocalFile(path)
            except Refused:
                continue
            assert lock.acquire(blocking=False)
            held.append(os.path.samestat(path.stat(), os.fstat(file._fd)))
            lock.release()
            file.close()

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held
    assert all(held)


def test_a_full_disk_ends_the_run_with_a_way_to_go_on(
    spawn: Spawn, run: Any, write_input: Write, tmp_path: Path
) -> None:
    """The written rows are kept; with free space, --resume completes the file as one run would."""
    source = write_input(*(line(str(n), say="x" * 1_000) for n in range(50)))
    out = tmp_path / "out"
    process = spawn("-i", source, "-o", out, options=["--file-bytes", "20000"])
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"the disk of {out} is full (File too large). Free some space" in err
    assert "--resume" in err
    assert "Traceback" not in err
    assert out.stat().st_size == 20_000
    assert run("-i", source, "-o", out, "--resume") == 0
    # The output holds 18 rows, and the spool as many of those that came before their turn.
    assert 50 - 2 * 20 < run.engine.num_requests < 40
    assert run("-i", source, "-o", tmp_path / "whole") == 0
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_device_that_is_full_ends_the_run(spawn: Spawn, write_input: Write) -> None:
    """/dev/full is written to as it is, without a lock or a look at its place."""
    process = spawn("-i", write_input(line("a")), "-o", "/dev/full")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "/dev/full cannot be written (No space left on device)" in err


def test_rows_of_a_folder_that_vanishes_are_saved(
    spawn: Spawn, write_input: Write, tmp_path: Path
) -> None:
    """The run ends and says where the rows are and how to go on from there."""
    source = write_input(line("a"), line("b"), line("c", wait=1.0), line("d", wait=60))
    folder, tmp_dir = tmp_path / "folder", tmp_path / "tmp"
    folder.mkdir()
    tmp_dir.mkdir()
    out = folder / "out"
    process = spawn("-i", source, "-o", out, "--output-tmp-dir", tmp_dir)
    wait_for_rows(out, 2)
    shutil.rmtree(folder)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    [saved] = tmp_dir.iterdir()
    assert f"{out} was removed during the run. Its rows are now in {saved}" in err
    assert "Traceback" not in err
    assert ids(rows(saved)) == ["a", "b", "c"]


def test_an_output_that_is_moved_away_ends_the_run(tmp_path: Path) -> None:
    """Its rows are where it was moved to."""
    file = LocalFile(tmp_path / "out")
    file.start(0)
    file.write(b"row\n")
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    with pytest.raises(OutputLost, match=r"was moved during the run.*--resume"):
        file.write(b"row\n")
    with pytest.raises(OutputLost, match="was moved during the run"):
        file.finish()
    file.close()
    assert (tmp_path / "elsewhere").read_bytes() == b"row\nrow\n"


def test_rows_go_to_standard_output_and_nothing_else_does(spawn: Spawn, write_input: Write) -> None:
    """Progress, warnings and what a library prints go to standard error."""
    source = write_input(line("a", print="noise"), line("b"))
    process = spawn("-i", source, "-o", "-")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert ids([json.loads(row) for row in out.splitlines()]) == ["a", "b"]
    assert "noise" in err
    assert "2 rows in" in err


def test_a_reader_that_goes_away_ends_the_run(spawn: Spawn, write_input: Write) -> None:
    """`tidemill run -o - | head` ends with a sentence and no traceback."""
    source = write_input(line("a"), line("b", wait=0.5))
    process: subprocess.Popen[str] = spawn("-i", source, "-o", "-")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "standard output was closed by its reader" in err
    assert "Traceback" not in err


def test_rows_are_put_to_a_url_once(
    run: Any, server: Any, write_input: Write, tmp_dir: Path
) -> None:
    """All rows in one body with a length, as presigned URLs want it; any 2xx is success."""
    server.will(Answer(204))
    flags = ["--output-tmp-dir", tmp_dir]
    source = write_input(line("a"), line("b", status=400))
    assert run("-i", source, "-o", f"{server.url}/out?{SECRET}", *flags) == 0
    [(method, path, body)] = server.received
    assert (method, path) == ("PUT", f"/out?{SECRET}")
    assert ids([json.loads(row) for row in body.splitlines()]) == ["a", "b"]
    assert "Transfer-Encoding" not in server.headers[0]
    assert "Content-Type" not in server.headers[0]
    assert list(tmp_dir.iterdir()) == []


def test_an_upload_is_tried_again_on_faults_that_may_pass(
    run: Any,
    server: Any,
    write_input: Write,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """500, a timeout, 503 and a redirect, then 200: each try sends every row."""
    monkeypatch.setattr(http_transfer, "_TIMEOUT_SECONDS", 0.2)
    server.will(
        Answer(500),
        Answer(hang=True),
        Answer(503),
        Answer(307, headers={"Location": "/there"}),
        Answer(200),
    )
    assert run("-i", write_input(line("a")), "-o", f"{server.url}/out") == 0
    assert [path for _, path, _ in server.received] == ["/out"] * 4 + ["/there"]
    bodies = {body for _, _, body in server.received}
    assert len(bodies) == 1
    assert bodies.pop().endswith(b"}\n")


@pytest.mark.parametrize("status", [403, 301, 500])
def test_rows_that_cannot_be_uploaded_are_kept(
    run: Any,
    server: Any,
    write_input: Write,
    tmp_dir: Path,
    status: int,
) -> None:
    """The server's words are shown, and where the rows are."""
    server.will(Answer(status, b"<Error>Request has expired: 0123456789abcdef</Error>"))
    flags = ["--output-tmp-dir", tmp_dir]
    with pytest.raises(TransferFailed) as failed:
        run("-i", write_input(line("a")), "-o", f"{server.url}/out?{SECRET}", *flags)
    words = str(failed.value)
    assert f"HTTP {status}" in words
    assert "<Error>Request has expired: …</Error>" in words
    assert "0123456789abcdef" not in words
    [kept] = tmp_dir.glob("*.jsonl")
    assert f"The rows are in {kept}" in words
    assert ids(rows(kept)) == ["a"]
    assert len(server.received) == (5 if status == 500 else 1)


def test_no_rows_are_an_empty_upload(run: Any, server: Any, write_input: Write) -> None:
    """An empty file gives an empty output, far away too."""
    server.will(Answer(200))
    assert run("-i", write_input(), "-o", f"{server.url}/out") == 0
    assert server.received == [("PUT", "/out", b"")]
