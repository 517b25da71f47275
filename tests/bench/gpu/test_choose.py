"""The script that chooses tiles, with a simulated card."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from bench.gpu.choose import Results, best_of, changed, main, merged, printed, until_then
from tidemill.engine.kernels.triton.tuned_tiles import FILE, KernelConfig, parse_configs

FIRST = KernelConfig({"ROWS": 16, "PLACES": 32}, 4, 2)


def test_numbers_are_changed_one_by_one_and_faster_choices_stay() -> None:
    """A config that does not run is skipped, however fast it might be."""
    tried: list[KernelConfig] = []

    def times(choice: KernelConfig) -> float | None:
        tried.append(choice)
        if choice.num_stages > 3:
            return None
        return 100 / choice.sizes["ROWS"] + abs(choice.num_warps - 8) + 1 / choice.num_stages

    found = best_of(FIRST, times)
    assert found is not None
    assert found.choice == KernelConfig({"ROWS": 32, "PLACES": 32}, 8, 3)
    assert (found.before, found.took) == (100 / 16 + 4 + 1 / 2, 100 / 32 + 1 / 3)
    assert len(tried) == 1 + sum(map(len, changed(FIRST)))
    assert best_of(FIRST, lambda _: None) is None


def test_results_are_written_for_the_requested_shapes() -> None:
    """They replace earlier entries for the same shapes; all else stays, and the file is valid."""
    data = json.loads(FILE.read_text(encoding="utf-8"))
    kernel = min(data)
    shape = frozenset({("arch", "sm_90"), ("width", 96)})
    once = merged(data, (kernel, shape), KernelConfig({"BLOCK": 8}, 2, 1))
    twice = merged(once, (kernel, shape), FIRST)
    [*before, added] = json.loads(printed(twice))[kernel]
    assert before == data[kernel]
    assert added == {
        "where": {"arch": "sm_90", "width": 96},
        "sizes": dict(FIRST.sizes),
        "num_warps": 4,
        "num_stages": 2,
    }
    assert parse_configs(json.loads(printed(twice))).keys() == data.keys()


def test_the_file_matches_the_output_of_the_script() -> None:
    """Its output then differs only in new results."""
    text = FILE.read_text(encoding="utf-8")
    assert printed(json.loads(text)) == text


def test_without_a_card_it_prints_the_choices_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    """The list has each kernel and shape, and running it is refused."""
    assert main(["--dry-run", "--models", "Qwen3-0.6B"]) == 0
    assert 'Qwen3-0.6B: norm {"arch": "sm_90", "width": 1024}: ' in capsys.readouterr().out
    assert main(["--dry-run", "--models", "Qwen3-30B-A3B", "--kernels", "grouped"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {re.search(r'"rows": (\d+)', line)[1] for line in lines}  # type: ignore[index]
    assert (len(lines), rows) == (10, {"8", "16", "32", "64", "128"})
    for form, kernel in (("fp8", "grouped"), ("mxfp4", "grouped_few_bits")):
        assert main(["--dry-run", "--models", f"Qwen3-30B-A3B:{form}", "--kernels", kernel]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 10
    for wrong in (["--models", "Llama-9"], ["--kernels", "gruped"], ["--models", "Qwen3-4B:fp9"]):
        with pytest.raises(SystemExit):
            main(wrong)
    assert "Llama-3-8B" in capsys.readouterr().err


def test_a_folder_keeps_tried_and_chosen_configs(tmp_path: Path) -> None:
    """A copy of the file takes what is better, and a second call knows what was tried."""
    before = FILE.read_text(encoding="utf-8")
    results = Results(tmp_path)
    assert results.done() == set()
    results.append("norm {}", {"took": 1.0})
    results.write(("norm", frozenset({("width", 96)})), FIRST)
    again = Results(tmp_path)
    assert again.done() == {"norm {}"}
    assert json.loads(again.file.read_text())["norm"][-1]["where"] == {"width": 96}
    assert FILE.read_text(encoding="utf-8") == before


def test_nothing_is_timed_once_the_time_is_up() -> None:
    """Every choice is unfit then, so a kernel ends with the best so far."""
    assert until_then(time.monotonic() + 60, lambda _: 1.0)(FIRST) == 1.0
    assert until_then(time.monotonic() - 1, lambda _: 1.0)(FIRST) is None
