"""Settings of rows: which of them differ, how that is shown, and how many rows have which."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tidemill.offline.files.row_settings import (
    RowSettings,
    SettingsUse,
    describe,
    differences,
    joined_settings,
    use_lines,
    without_raised_limits,
)


def model(name: str, revision: str | None = None, digest: str | None = None) -> dict[str, Any]:
    """Return the value of a model."""
    return {"--model": {"name": name, "revision": revision, "digest": digest}}


@pytest.mark.parametrize(
    ("before", "now", "are_same"),
    [
        (model("a", digest="x"), model("b", digest="x"), True),
        (model("a", digest="x"), model("a", digest="y"), False),
        (model("a", "r", "x"), model("b", "r", "y"), True),
        (model("a", "r", "x"), model("a", "s", "x"), True),
        (model("a", "r", "x"), model("a", "s", "y"), False),
        (model("a", "r"), model("a", digest="y"), True),
        (model("a"), model("b", digest="y"), False),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 2, "x": 1}}, False),
        ({"a": 0}, {}, False),
    ],
)
def test_files_of_a_model_count_more_than_its_name(
    before: dict[str, Any], now: dict[str, Any], are_same: Any
) -> None:
    """Either identifier is enough; members of an object count in their order, as in a schema."""
    assert (not differences(before, now)) is are_same
    assert (not differences(now, before)) is are_same


def test_only_a_higher_limit_of_answers_is_raised() -> None:
    """No limit of tokens is a higher one; a lower one or another setting is a difference."""
    raised = {"--max-tokens": (5, 9), "--max-model-len": (5, 6)}
    assert not without_raised_limits({"--max-tokens": (5, None)})
    others = {"--seed": (1, 2), "--temperature": (0, 1)}
    assert without_raised_limits(raised | others) == others
    for pair in ((9, 5), (None, 5)):
        assert without_raised_limits({"--max-tokens": pair})
    assert without_raised_limits({"--max-model-len": (5, None)})


def test_values_are_shortened_to_where_they_differ() -> None:
    """Text of one line, whatever is in it."""
    long = "x" * 300
    [shown] = describe({"--system-prompt": (f"{long}a\n", f"{long}b\udc80")})
    assert shown.startswith("  --system-prompt: …xxx")
    assert '\\n" before, …xxx' in shown
    assert len(shown) < 120
    assert shown.encode()


def test_numbers_of_rows_are_given_where_they_are_known() -> None:
    """A retry replaces rows of settings that are unknown."""
    first = RowSettings((SettingsUse({"--seed": 1}),)).continued({"--seed": 2}, 7, is_retry=True)
    assert [use.num_rows for use in first.counted(10).uses] == [7, 3]
    second = first.continued({"--seed": 3}, 9, is_retry=False)
    assert [use.num_rows for use in second.counted(12).uses] == [7, 2, 3]
    third = first.continued({"--seed": 2}, 9, is_retry=True)
    assert [use.num_rows for use in third.counted(10).uses] == [None, None]
    assert use_lines(second.counted(12).uses) == [
        "7 rows: --seed 1",
        "2 rows: --seed 2",
        "3 rows: --seed 3",
    ]
    assert use_lines(third.uses)[0] == "an unknown number of rows: --seed 1"


def test_joined_rows_have_the_settings_of_all_shards(tmp_path: Path) -> None:
    """Equal ones once, with the sum of their rows; unknown ones apart."""
    one, other = SettingsUse({"--seed": 1}, 3), SettingsUse({"--seed": 2}, 4)
    parts = [(RowSettings((one, other)), 7), (RowSettings((one,)), 3), (None, 5)]
    joined = joined_settings(parts)
    assert joined is not None
    assert [(use.settings, use.num_rows) for use in joined.uses] == [
        ({"--seed": 1}, 6),
        ({"--seed": 2}, 4),
        (None, 5),
    ]
    joined.save(tmp_path / "x.settings")
    assert RowSettings.load(tmp_path / "x.settings") == joined
    assert joined_settings([(None, 5)]) is None
    assert RowSettings.load(tmp_path / "none") is None


def test_dates_of_a_recipe_are_settings(tmp_path: Path) -> None:
    """TOML has dates, JSON has none: they are stored as text and compare as equal."""
    settings = {"params": {"metadata": {"day": date(2026, 1, 1)}}}
    RowSettings((SettingsUse(settings),)).save(tmp_path / "settings")
    loaded = RowSettings.load(tmp_path / "settings")
    assert loaded is not None
    assert loaded.latest is not None
    assert not differences(loaded.latest, settings)
