"""Parameters of a new batch, and the errors for invalid ones."""

from __future__ import annotations

import re
from contextlib import suppress
from email.header import Header
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.net.inside import HOSTS, NAMES, in_url
from tidemill.batch.batch_request import (
    MAX_WINDOW_SECONDS,
    MIN_WINDOW_SECONDS,
    options_of_request,
    parse_options,
    parse_request,
    window_seconds,
)
from tidemill.batch.errors import InvalidOption, KeyReused
from tidemill.batch.model import Options, Retry
from tidemill.batch.retry_request import RetryParams

UNITS = {"m": 60, "h": 3600, "d": 86400}
GOOD_URL = "https://bucket.s3.amazonaws.com/out.jsonl?X-Amz-Signature=ab%2Fcd&x=1"
BAD_URLS = [
    "",
    "http://example.com/",
    "ftp://example.com/",
    "example.com/out",
    "https:///out",
    "https://:443/out",
    "https://example.com:0/",
    "https://example.com:99999/",
    "https://user@example.com/",
    "https://user:secret@example.com/",
    "https://@example.com/",
    r"https://example.com\@10.0.0.1/",
    "https://example.com/a b",
    "https://example.com/\n",
    "https://exämple.com/",
    "https://[::1/",
    "https://example.com/" + "x" * 8192,
    "https://127.1:8443/",
    *(f"https://{in_url(host)}/latest/" for host in [*HOSTS, *NAMES]),
]


def test_an_upload_without_metadata_has_the_defaults() -> None:
    """They are a window of 24 hours or the deployment's, no URLs, and `on_invalid_line` fail."""
    assert parse_options({}) == Options("24h", None, None, "fail", {})
    assert parse_options({}, "2d") == Options("2d", None, None, "fail", {})
    assert parse_options({"completion-window": "30m"}, "2d").completion_window == "30m"


def test_an_upload_has_all_options_in_its_metadata() -> None:
    """Names with dashes, in any case, are options; all others are metadata."""
    given = {
        "Completion-Window": "30m",
        "output-url": GOOD_URL,
        "error-url": "https://example.com:8443/e",
        "webhook-url": f"{GOOD_URL}/hook",
        "on-invalid-line": "skip",
        "strict-parameters": "True",
        "priority": "-7",
        "echo-fields": "label, metadata,label",
        "project": "tides",
        "completion_window": "left alone",
    }
    assert parse_options(given) == Options(
        "30m",
        GOOD_URL,
        "https://example.com:8443/e",
        "skip",
        {"project": "tides", "completion_window": "left alone"},
        webhook_url=f"{GOOD_URL}/hook",
        strict_parameters=True,
        priority=-7,
        echo_fields=("label", "metadata"),
    )


@pytest.mark.parametrize("value", [True, 1.5, "5", [], 101, -101, 10**400])
def test_a_priority_is_an_integer_of_at_most_a_hundred(value: object) -> None:
    """An upload has it as text; the error is one sentence with the name and the value."""
    assert options_of_request({"priority": -100}).priority == -100
    words = r"^`priority` must be an integer between -100 and 100; got .+\.$"
    with pytest.raises(InvalidOption, match=words):
        options_of_request({"priority": value})
    for text in ("high", "", "1e3", "1.5", "101", "9" * 5000):
        with pytest.raises(InvalidOption, match=words):
            parse_options({"priority": text})


def test_a_repeated_request_has_the_batch_of_an_earlier_version() -> None:
    """It stored priority 0 for a request without one; another priority is another request."""
    request = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions"}
    params, stored = parse_request(request), parse_request({**request, "priority": 0})
    fields = {name: getattr(stored, name) for name in ("input_file_id", "endpoint", "options")}
    batch: Any = SimpleNamespace(**fields, retry=Retry("batch_1"))
    params.check_same(batch)
    RetryParams(Retry("batch_1"), params.options).check_same(batch)
    with pytest.raises(KeyReused):
        parse_request({**request, "priority": 1}).check_same(batch)


@pytest.mark.parametrize(("given", "priority"), [({}, -7), ({"priority": 0}, 0)])
def test_a_priority_takes_precedence_over_that_of_the_recipe(
    given: dict[str, Any], priority: int
) -> None:
    """Intake does not change it, so a repeated request has the options of its batch."""
    request = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", **given}
    recipe = {"prompt": "{{ text }}", "priority": -7}
    assert parse_request(request | {"recipe": recipe}).options.priority == priority


@pytest.mark.parametrize(
    "value",
    ["label", [], [""], ["a", 1], ["id"], ["body"], ["\ud800"], ["x" * 65], [*map(str, range(17))]],
)
def test_echoed_fields_are_not_those_of_rows(value: object) -> None:
    """The error is one sentence with the allowed names."""
    assert options_of_request({"echo_fields": ["a", " b", "a"]}).echo_fields == ("a", "b")
    words = "^`echo_fields` must be 1 to 16 names of up to 64 characters, other than id, custom_id,"
    with pytest.raises(InvalidOption, match=words):
        options_of_request({"echo_fields": value})
    for text in ("", "a,", "label,response"):
        with pytest.raises(InvalidOption, match=r"^`echo-fields` must be 1 to 16 names"):
            parse_options({"echo-fields": text})
    table = {"endpoint": "/v1/chat/completions", "recipe": {"prompt": "{{ text }}"}}
    with pytest.raises(InvalidOption, match="not supported for tables: `keep` of the recipe"):
        parse_request({**table, "input_file_id": "file-1", "echo_fields": ["label"]})


@pytest.mark.parametrize("value", ["", "yes", "1"])
def test_strict_parameters_of_an_upload_are_true_or_false(value: str) -> None:
    """Other words are refused, never interpreted."""
    assert not parse_options({"strict-parameters": "false"}).strict_parameters
    with pytest.raises(InvalidOption) as caught:
        parse_options({"strict-parameters": value})
    assert caught.value.param == "strict-parameters"


def test_a_request_has_the_same_options_with_underscores() -> None:
    """Null means missing; unknown parameters of other clients are ignored."""
    given = {
        "completion_window": "14d",
        "output_url": None,
        "error_url": GOOD_URL,
        "webhook_url": GOOD_URL,
        "on_invalid_line": None,
        "metadata": {"a": "ü"},
        "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    }
    assert options_of_request(given) == Options(
        "14d", None, GOOD_URL, "fail", {"a": "ü"}, 3600, GOOD_URL
    )
    assert options_of_request({"metadata": None}) == Options()


@given(st.integers(1, 999_999), st.sampled_from("mhd"))
def test_a_window_is_a_number_and_a_unit(number: int, unit: str) -> None:
    """Only windows from 30 minutes to 14 days are accepted."""
    seconds = number * UNITS[unit]
    if MIN_WINDOW_SECONDS <= seconds <= MAX_WINDOW_SECONDS:
        assert window_seconds(f"{number}{unit}") == seconds
    else:
        with pytest.raises(InvalidOption, match="from 30m to 14d"):
            window_seconds(f"{number}{unit}")


@given(st.one_of(st.text(), st.none(), st.integers(), st.floats(), st.lists(st.text())))
def test_any_other_window_is_an_invalid_option(value: object) -> None:
    """Any value is either a number of seconds within the bounds or refused by name."""
    with suppress(InvalidOption):
        assert MIN_WINDOW_SECONDS <= window_seconds(value) <= MAX_WINDOW_SECONDS


@pytest.mark.parametrize(
    "window", ["29m", "15d", "0h", "024h", "24", "24H", "24 h", "٢٤h", "1.5h", "24h\n", "-24h"]
)
def test_a_window_is_parsed_strictly(window: str) -> None:
    """Leading zeros, other digits, spaces and values outside the bounds are refused."""
    with pytest.raises(InvalidOption) as caught:
        parse_options({"completion-window": window})
    assert caught.value.param == "completion-window"
    assert "`completion-window`" in caught.value.message


@pytest.mark.parametrize("url", BAD_URLS)
@pytest.mark.parametrize("name", ["output", "error"])
def test_a_url_is_https_with_a_host_and_no_user(name: str, url: str) -> None:
    """Others are refused with a message that never contains the URL, which may be secret."""
    with pytest.raises(InvalidOption) as caught:
        parse_options({f"{name}-url": url})
    assert caught.value.param == f"{name}-url"
    assert not url or url not in caught.value.message
    with pytest.raises(InvalidOption) as caught:
        options_of_request({f"{name}_url": url})
    assert caught.value.param == f"{name}_url"


@pytest.mark.parametrize("url", ["https://example.com:SECRET/x", "https://[SECRET]/x"])
def test_no_part_of_a_url_is_shown(url: str) -> None:
    """The parser's reason would quote an invalid URL."""
    with pytest.raises(InvalidOption) as caught:
        options_of_request({"output_url": url})
    assert "SECRET" not in caught.value.message


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({f"k{number}": "v" for number in range(17)}, "17 key-value pairs; the limit is 16"),
        ({"": "v"}, "an empty key"),
        ({"k" * 65: "v"}, "key of 65 characters; the limit is 64"),
        ({"k": "v" * 513}, "513 characters at 'k'; the limit is 512"),
        ({"k": 1}, "only strings"),
        ({"k": None}, "only strings"),
        ({"k": "\ud800"}, "only strings"),
        (["k"], "an object of strings"),
        ("k", "an object of strings"),
    ],
)
def test_metadata_has_the_limits_of_openai(metadata: object, words: str) -> None:
    """The limits are 16 pairs of strings, keys of 64 and values of 512 characters."""
    with pytest.raises(InvalidOption, match=words) as caught:
        options_of_request({"metadata": metadata})
    assert caught.value.param == "metadata"


def test_metadata_at_its_limits_is_accepted() -> None:
    """It has 16 pairs with the longest keys and values."""
    metadata = {f"{number:064}": "ü" * 512 for number in range(16)}
    assert options_of_request({"metadata": metadata}).metadata == metadata
    assert parse_options(metadata).metadata == metadata


def test_an_upload_has_the_same_limits() -> None:
    """The rest of its user metadata counts as metadata."""
    with pytest.raises(InvalidOption, match="17 key-value pairs"):
        parse_options({f"k{number}": "v" for number in range(17)} | {"on-invalid-line": "fail"})


@pytest.mark.parametrize("value", ["Skip", "", "ignore", 1, True, []])
def test_on_invalid_line_is_fail_or_skip(value: object) -> None:
    """Other values of any type are refused."""
    with pytest.raises(InvalidOption, match="on_invalid_line") as caught:
        options_of_request({"on_invalid_line": value})
    assert caught.value.param == "on_invalid_line"


@given(st.text(st.characters(codec="utf-8", categories=["L", "N", "Zs", "P"]), max_size=100))
def test_encoded_values_are_decoded(text: str) -> None:
    """S3's encoding of a non-ASCII value is decoded."""
    encoded = Header(text, "utf-8", maxlinelen=10_000).encode()
    assert parse_options({"note": encoded}).metadata == {"note": text}


@pytest.mark.parametrize(
    "text",
    ["=?nonsense?B?w6k=?=", "=?UTF-8?B?w6?=", "=?UTF-8?B?/w==?=", "=?", "a =?UTF-8?", "=?é?q?x?="],
)
def test_invalid_encoded_values_stay_unchanged(text: str) -> None:
    """A file is not refused for them."""
    assert parse_options({"note": text}).metadata == {"note": text}


@given(
    st.dictionaries(
        st.sampled_from(["completion_window", "output_url", "webhook_url", "on_invalid_line", "x"]),
        st.one_of(
            st.none(), st.text(), st.integers(), st.lists(st.none()), st.sampled_from(["4h"])
        ),
    )
)
def test_any_request_gives_options_or_an_error(fields: dict[str, Any]) -> None:
    """No client input raises anything except InvalidOption."""
    with suppress(InvalidOption):
        options = options_of_request(fields)
        assert options.completion_window == (fields.get("completion_window") or "24h")
        assert options.output_url == fields.get("output_url")


@pytest.mark.parametrize("seconds", [3600, 2_592_000])
def test_results_may_expire_after_an_hour_to_thirty_days(seconds: int) -> None:
    """The limits are OpenAI's."""
    policy = {"anchor": "created_at", "seconds": seconds}
    options = options_of_request({"output_expires_after": policy})
    assert options.output_expires_seconds == seconds


@pytest.mark.parametrize(
    ("policy", "param"),
    [
        ([], "output_expires_after"),
        ({}, "output_expires_after"),
        ({"anchor": "now", "seconds": 3600}, "output_expires_after"),
        ({"anchor": "created_at"}, "output_expires_after.seconds"),
        ({"anchor": "created_at", "seconds": 3599}, "output_expires_after.seconds"),
        ({"anchor": "created_at", "seconds": 2_592_001}, "output_expires_after.seconds"),
        ({"anchor": "created_at", "seconds": True}, "output_expires_after.seconds"),
        ({"anchor": "created_at", "seconds": "3600"}, "output_expires_after.seconds"),
        ({"anchor": "created_at", "seconds": 1e9}, "output_expires_after.seconds"),
    ],
)
def test_an_invalid_expiry_is_refused(policy: object, param: str) -> None:
    """The error names the parameter."""
    with pytest.raises(InvalidOption) as caught:
        options_of_request({"output_expires_after": policy})
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("recipe", "endpoint", "words"),
    [
        ({"promt": "x"}, "/v1/chat/completions", "`recipe` is not valid: `promt` is not a recipe"),
        ({"ask": ["a: b?"]}, "/v1/chat/completions", "`recipe` are for /v1/decisions"),
        ({"prompt": "x" * 2**16}, "/v1/chat/completions", "longer than 65,536 bytes"),
        (
            {"ask": ["a: b?"], "calibration": "x.calibration.json"},
            "/v1/decisions",
            "or the content of one",
        ),
    ],
)
def test_a_recipe_is_checked_before_the_batch_exists(
    recipe: dict[str, Any], endpoint: str, words: str
) -> None:
    """An API request with an invalid one creates no batch."""
    with pytest.raises(InvalidOption, match=re.escape(words)):
        parse_request({"input_file_id": "file-1", "endpoint": endpoint, "recipe": recipe})
