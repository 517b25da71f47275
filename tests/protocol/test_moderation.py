"""Categories of a classifier's labels."""

from __future__ import annotations

import pytest

from tidemill.protocol.moderation import are_named, category_of

HARMLESS = """
SAFE|ok|Neither|NOT|not_toxic|nontoxic|Non-Toxic|nothate|not_hate_speech|unoffensive|Not Offensive
no spam|ham
""".replace("\n", "|")


@pytest.mark.parametrize("label", [label for label in HARMLESS.split("|") if label])
def test_a_harmless_label_has_no_category(label: str) -> None:
    """It is a known word, or a known harm after a negation."""
    assert category_of(label) is None


@pytest.mark.parametrize(
    "label",
    [
        *("not safe", "Not Safe For Work", "not_ok", "Non-Violent Crimes", "non-consensual nudity"),
        *("nsfw", "toxic", "nothing", "Nötigung"),
    ],
)
def test_any_other_label_is_its_own_category(label: str) -> None:
    """A negation alone does not make it harmless."""
    assert category_of(label) == label


def test_labels_without_names_are_recognised() -> None:
    """One name is enough."""
    assert not are_named(["LABEL_0", "LABEL_1"])
    assert are_named(["LABEL_0", "hate"])
