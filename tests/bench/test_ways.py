"""The counter of files on each path: its counts, and that every path can run."""

from __future__ import annotations

import threading
from pathlib import PurePath

import pytest

from bench.ways import (
    Recorder,
    main,
    record_chat,
    record_csv,
    record_drop,
    record_row,
    record_step,
)
from tidemill.batch import object_keys
from tidemill.protocol import names


def test_files_count_while_recorded_on_every_thread() -> None:
    """Neither what ran before nor what other packages do."""
    recorder = Recorder()
    with recorder.installed():
        names.own_names(["x"])
        with recorder.recording():
            thread = threading.Thread(target=object_keys.batch_id_of_drop, args=("b", "k", "1"))
            thread.start()
            thread.join()
    assert recorder.files == {"batch/object_keys.py"}
    assert recorder.main_thread_files == set()


def test_a_step_enters_no_file_of_a_feature_that_is_off() -> None:
    """Neither drafts, failures nor a second group of states; it stays within the engine."""
    way = record_step()
    assert all(name.startswith("engine/") for name in way.files)
    assert {"engine/model/network/decoder.py", "engine/scheduling/scheduler.py"} < way.files
    off = {"blame", "cost_model", "device_health", "drafter", "drafts", "groups", "ngram"}
    assert not off & {PurePath(name).stem for name in way.files}
    assert len(way.files) <= 24
    assert way.count <= 14


def test_a_chat_keeps_to_its_files() -> None:
    """Files on the event loop delay other requests; those of features that are off do not run."""
    way = record_chat()
    off = {"confidence", "constraints", "image_inputs", "parts", "request", "stream", "tools"}
    assert not off & {PurePath(name).stem for name in way.files}
    assert way.count <= 30


def test_a_row_needs_no_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """It goes through the plan and the feed to the output."""
    way = record_row()
    capsys.readouterr()
    assert {"offline/run/feed.py", "offline/files/output.py"} < way.files
    others = [name for name in way.files if name.startswith(("engine/", "handler/", "server/"))]
    assert others == []
    assert "offline/files/spool.py" not in way.files
    assert len(way.files) <= 10


def test_a_row_of_a_table_keeps_to_its_files(capsys: pytest.CaptureFixture[str]) -> None:
    """Reading, checking and writing it need no file of a feature that is off."""
    way = record_csv()
    capsys.readouterr()
    assert {"batch/table/request_template.py", "batch/table/writer.py"} < way.files
    off = {"confidence", "names", "parts", "request", "routes", "spool", "stream", "tools"}
    assert not off & {PurePath(name).stem for name in way.files}
    assert len(way.files) <= 20


def test_a_dropped_file_of_requests_is_not_looked_at_as_a_table() -> None:
    """It is not converted, either, and there are as few calls to AWS as possible."""
    way = record_drop()
    off = {"convert", "detection", "failures", "pause", "recipes", "scale", "table_lines"}
    assert not off & {PurePath(name).stem for name in way.files}
    assert len(way.files) <= 40
    assert way.count == 13


def test_the_table_has_a_line_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    """It lists the files on request."""
    main(["row", "--files"])
    shown = capsys.readouterr().out
    assert "| a row: engine to output |" in shown
    assert "  offline/run/feed.py" in shown
