"""Body forms: what lines with the same parameters share is found and checked once."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from tidemill.offline.plan.body_form import BodyForms
from tidemill.protocol.errors import RequestError
from tidemill.protocol.requests import check_request

CHAT = "/v1/chat/completions"


def test_requests_that_differ_in_texts_are_validated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All others get the error of `check_request`, even after a valid one with equal values."""
    forms, checked = BodyForms(["tiny"]), list[str]()

    def check(url: str, body: dict[str, Any], *names: Any) -> BaseModel:
        checked.append(url)
        return check_request(url, body, *names)

    monkeypatch.setattr("tidemill.offline.plan.body_form.check_request", check)

    def error_of(check: Any, *arguments: Any) -> str | None:
        try:
            check(*arguments)
        except RequestError as exc:
            return exc.message
        return None

    texts = [
        (CHAT, {"messages": [{"role": "user", "content": text}], "temperature": 0})
        for text in ("a", "", "é")
    ]
    texts += [("/v1/completions", {"prompt": text, "n": 2}) for text in ("a", "b")]
    others = [
        (CHAT, {**texts[0][1], "temperature": value}) for value in (False, float("nan"), None)
    ]
    others += [
        (CHAT, {"temperature": 0, "messages": [message]})
        for message in (
            {"role": "user", "content": 5},
            {"role": "user", "content": "a", "tool_calls": [{}]},
            {"role": "tool", "content": "a"},
            {"content": "a"},
            "a",
        )
    ]
    others += [
        ("/v1/completions", {"prompt": "", "n": 2}),
        ("/v1/completions", {"prompt": [], "n": 2}),
        (CHAT, {**texts[0][1], "prompt": "a"}),
        ("/v1/nothing", texts[0][1]),
    ]
    for url, body in (*texts, *others):
        found = error_of(forms.check, url, body, forms.form_of(url, body))
        assert found == error_of(check_request, url, body, ["tiny"])
    assert len(checked) == 2 + len(others)


def test_long_roles_are_not_kept() -> None:
    """Any text is a valid role, so that a file's roles may be as large as the file."""
    forms = BodyForms(["tiny"])
    for role, num_kept in (("a" * 1024, 1), ("b" * 1025, 1), ("c", 2)):
        body = {"messages": [{"role": role, "content": "a"}]}
        form = forms.form_of(CHAT, body)
        forms.check(CHAT, body, form)
        assert len(form.valid_roles) == num_kept
