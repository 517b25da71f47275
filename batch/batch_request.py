"""Parameters of a new batch: from `POST /v1/batches`, or from the user metadata of an upload.

It contains all checks that need no AWS call. A request has OpenAI's parameters, and ours as
`extra_body`: `BatchRequest` (batch_body.py) checks only types, and `parse_request` the values. An
upload has the same options: it spells their names with dashes, and `recipe-` starts the keys of a
table's recipe. All other user metadata becomes the batch's `metadata`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from email.errors import MessageError
from email.header import decode_header, make_header
from types import MappingProxyType
from typing import Any, Final, get_args
from urllib.parse import urlsplit

from tidemill.net.public_addresses import is_internal_host
from tidemill.protocol.errors import RequestError
from tidemill.protocol.routes import ENDPOINTS, known_route

from .errors import InvalidOption, KeyReused, excerpt
from .escalation import EscalateBy
from .model import MAX_PRIORITY, Batch, OnInvalidLine, Options, is_priority, is_share
from .object_keys import MAX_KEY_BYTES

DEFAULT_WINDOW: Final = "24h"
MIN_WINDOW_SECONDS: Final = 30 * 60
MAX_WINDOW_SECONDS: Final = 14 * 24 * 3600

_UNIT_SECONDS = {"m": 60, "h": 3600, "d": 24 * 3600}
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([mhd])", re.ASCII)


def window_seconds(window: object, *, param: str = "completion_window") -> int:
    """Return the seconds of a window such as `30m`, `24h` or `14d`; raises InvalidOption."""
    match = _WINDOW.fullmatch(window) if isinstance(window, str) else None
    seconds = int(match[1]) * _UNIT_SECONDS[match[2]] if match else 0
    if not MIN_WINDOW_SECONDS <= seconds <= MAX_WINDOW_SECONDS:
        raise InvalidOption(
            f"`{param}` must be a number of minutes, hours or days, from 30m to 14d, such as 24h; "
            f"got {excerpt(window)}.",
            param=param,
        )
    return seconds


MAX_METADATA_PAIRS: Final = 16
MAX_METADATA_KEY_CHARS: Final = 64
MAX_METADATA_VALUE_CHARS: Final = 512
MAX_URL_CHARS: Final = 8192
MIN_EXPIRY_SECONDS: Final = 3600
MAX_EXPIRY_SECONDS: Final = 30 * 24 * 3600
MAX_IDEMPOTENCY_KEY_CHARS: Final = 255
S3: Final = "s3://"
RECIPE_PREFIX: Final = "recipe-"
"""Prefix of the user metadata that are keys of a table's recipe."""

_MAX_NAME_BYTES = len(S3) + 63 + 1 + MAX_KEY_BYTES  # 63 for the bucket's name
_MAX_COST = 10**9
_OF_ROWS = ("id", "custom_id", "response", "error", "body")
_MAX_ECHO_FIELDS = 16
ECHO_FIELDS: Final = (
    f"1 to {_MAX_ECHO_FIELDS} names of up to {MAX_METADATA_KEY_CHARS} characters, other than "
    f"{', '.join(_OF_ROWS)}"
)
"""Description of valid `echo_fields`."""

ECHO_OF_TABLE: Final = (
    "`echo_fields` is not supported for tables: `keep` of the recipe copies columns to the output."
)

_URL_CHARS = re.compile(r"[!-\[\]-~]+", re.ASCII)  # printable, no space and no backslash
_URLS = ("output_url", "error_url", "webhook_url")
_NUMBERS = ("max_cost", "escalate_below", "target_accuracy")
_NAMES = (
    "completion_window",
    *_URLS,
    "on_invalid_line",
    *_NUMBERS,
    "strict_parameters",
    *("escalate", "escalate_by", "priority", "echo_fields"),
)
_BOOLEANS: Mapping[str, bool] = MappingProxyType({"true": True, "false": False})


@dataclass(frozen=True, slots=True)
class BatchParams:
    """A new batch with the parameters of a request, checked without calling AWS."""

    input_file_id: str
    endpoint: str
    options: Options
    idempotency_key: str | None = None

    def check_same(self, existing: Batch) -> None:
        """Raise KeyReused if an existing batch of this key has other parameters."""
        given = (existing.input_file_id, existing.endpoint, explicit(existing.options))
        if given != (self.input_file_id, self.endpoint, explicit(self.options)):
            raise KeyReused(
                "This `idempotency_key` was already used for another file, endpoint or options: "
                "use a new key.",
                param="idempotency_key",
            )


def explicit(options: Options) -> Options:
    """Return options with the priority that none means, which earlier versions stored."""
    return replace(options, priority=options.priority or 0)


def parse_request(fields: Mapping[str, Any]) -> BatchParams:
    """Return the parameters of an API request; raises InvalidOption.

    A null field counts as missing; unknown fields are ignored.
    """
    options = options_of_request(fields)
    endpoint = _check_endpoint(fields.get("endpoint"))
    idempotency_key = check_idempotency_key(fields.get("idempotency_key"))
    recipe = fields.get("recipe")
    if recipe is not None:
        if options.echo_fields:
            raise InvalidOption(ECHO_OF_TABLE, param="echo_fields")
        text, priority = _check_recipe(recipe, endpoint)
        if options.priority is None:
            options = replace(options, priority=priority)
        options = replace(options, table_recipe=text)
    return BatchParams(_check_name(fields.get("input_file_id")), endpoint, options, idempotency_key)


def parse_options(
    user_metadata: Mapping[str, str], default_window: str = DEFAULT_WINDOW
) -> Options:
    """Return the options in the user metadata of an upload; raises InvalidOption.

    `default_window` is the default completion window. Values may be encoded by RFC 2047, which is
    how S3 returns non-ASCII text.
    """
    values: dict[str, Any] = {name.lower(): _decode(text) for name, text in user_metadata.items()}
    names = {name: name.replace("_", "-") for name in _NAMES}
    requested = {name: values.pop(spelled, None) for name, spelled in names.items()}
    if requested["completion_window"] is None:
        requested["completion_window"] = default_window
    for name in _NUMBERS:
        with suppress(TypeError, ValueError):
            requested[name] = float(requested[name])
    with suppress(TypeError, ValueError):
        requested["priority"] = int(requested["priority"])
    if requested["echo_fields"] is not None:
        requested["echo_fields"] = requested["echo_fields"].split(",")
    is_strict = requested["strict_parameters"]
    if is_strict is not None:
        requested["strict_parameters"] = _BOOLEANS.get(is_strict.lower(), is_strict)
    recipe = {name: values.pop(name) for name in [*values] if name.startswith(RECIPE_PREFIX)}
    keys = {name.removeprefix(RECIPE_PREFIX): text for name, text in recipe.items()}
    return replace(_check(requested, names, values), recipe=keys)


def options_of_request(fields: Mapping[str, Any]) -> Options:
    """Return the options among the fields of an API request; raises InvalidOption."""
    requested = {name: fields.get(name) for name in _NAMES}
    options = _check(requested, {name: name for name in _NAMES}, fields.get("metadata"))
    expiry = _check_expiry(fields.get("output_expires_after"))
    return replace(options, output_expires_seconds=expiry)


def echo_field_names(names: object) -> tuple[str, ...] | None:
    """Return unique names of fields next to a line's body; None if one is not valid."""
    if not isinstance(names, list | tuple) or not all(map(_is_text, names)):
        return None
    unique = tuple(dict.fromkeys(name.strip() for name in names))
    is_valid = 0 < len(unique) <= _MAX_ECHO_FIELDS and set(_OF_ROWS).isdisjoint(unique)
    is_valid &= all(0 < len(name) <= MAX_METADATA_KEY_CHARS for name in unique)
    return unique if is_valid else None


def check_url(value: object, param: str) -> str:
    """Return an https URL; raises InvalidOption.

    This checks only the text; the host's addresses are checked when it is dialled.
    """
    problem = _problem_of_url(value)
    if problem is not None or not isinstance(value, str):
        # The URL itself is never shown: a presigned one is a secret.
        raise InvalidOption(f"`{param}` must be an https URL: {problem}.", param=param)
    return value


def _check_name(input_file_id: object) -> str:
    if not isinstance(input_file_id, str) or not _is_name(input_file_id):
        raise invalid_input_file("must be a file ID, or s3:// with a bucket and a key")
    return input_file_id


def _is_name(text: str) -> bool:
    """Say whether S3 or the table could contain such a name."""
    try:
        return 0 < len(text.encode()) <= _MAX_NAME_BYTES
    except UnicodeEncodeError:  # a lone surrogate
        return False


def _check_endpoint(endpoint: object) -> str:
    try:
        return known_route(endpoint if isinstance(endpoint, str) else "").name
    except RequestError as exc:
        supported = ", ".join(ENDPOINTS)
        raise InvalidOption(f"`endpoint` must be one of {supported}.", param="endpoint") from exc


def _check_recipe(keys: Mapping[str, Any], endpoint: str) -> tuple[str, int | None]:
    """Return the keys of a recipe as JSON, and its priority; raises InvalidOption."""
    # Imported late: few batches are tables.
    from .table.drop_recipe import MAX_BYTES
    from .table.errors import RecipeError
    from .table.recipe import parse_recipe

    param = "recipe"
    try:
        recipe = parse_recipe(keys, may_escalate=True)
    except RecipeError as exc:
        raise InvalidOption(f"`recipe` is not valid: {exc}.", param=param) from exc
    if recipe.url != endpoint:
        words = f"`endpoint` is {endpoint}, but the requests of `recipe` are for {recipe.url}."
        raise InvalidOption(words, param="endpoint")
    text = json.dumps(keys, ensure_ascii=False)
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise InvalidOption(f"`recipe` is longer than {MAX_BYTES:,} bytes.", param=param)
    return text, recipe.priority


def check_idempotency_key(key: object) -> str | None:
    """Return an idempotency key; raises InvalidOption."""
    if key is None or (isinstance(key, str) and 0 < len(key) <= MAX_IDEMPOTENCY_KEY_CHARS):
        return key
    raise InvalidOption(
        "`idempotency_key` must be a string of 1 to 255 characters.", param="idempotency_key"
    )


def invalid_input_file(words: str) -> InvalidOption:
    """Return the error for an `input_file_id`."""
    return InvalidOption(f"`input_file_id` {words}.", param="input_file_id")


def _check(requested: Mapping[str, Any], names: Mapping[str, str], metadata: object) -> Options:
    window = (
        DEFAULT_WINDOW if requested["completion_window"] is None else requested["completion_window"]
    )
    window_seconds(window, param=names["completion_window"])
    urls: dict[str, Any] = {
        name: None if requested[name] is None else check_url(requested[name], names[name])
        for name in _URLS
    }
    return Options(
        completion_window=window,
        **urls,
        on_invalid_line=_check_choice(requested["on_invalid_line"], names["on_invalid_line"]),
        metadata=_check_metadata(metadata),
        max_cost=_check_cost(requested["max_cost"], names["max_cost"]),
        strict_parameters=_check_boolean(
            requested["strict_parameters"], names["strict_parameters"]
        ),
        **_check_escalation(requested, names),
        priority=_check_priority(requested["priority"], names["priority"]),
        echo_fields=_check_echo_fields(requested["echo_fields"], names["echo_fields"]),
    )


def _check_escalation(requested: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    model, target = requested["escalate"], requested["target_accuracy"]
    field = "escalate_below" if target is None else "target_accuracy"
    share, param, by = requested[field], names["escalate"], requested["escalate_by"]
    if model is None and share is None and by is None:
        return {}
    if not (isinstance(model, str) and model):
        words = f"`{param}` must be the name of the model that decides escalated rows."
        raise InvalidOption(words, param=param)
    if field == "target_accuracy" and requested["escalate_below"] is not None:
        words = f"`{names['escalate_below']}` and `{names[field]}` cannot be combined: omit one."
        raise InvalidOption(words, param=names[field])
    if not is_share(share):
        words = f"`{names[field]}` must be above 0 and at most 1 for `{param}`"
        raise InvalidOption(f"{words}; got {excerpt(share)}.", param=names[field])
    if by not in {None, *get_args(EscalateBy)}:
        words = f'`{names["escalate_by"]}` must be "decision" or "chat"; got {excerpt(by)}.'
        raise InvalidOption(words, param=names["escalate_by"])
    return {"escalate": model, field: float(share), "escalate_by": by or "decision"}


def _check_cost(value: Any, param: str) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= _MAX_COST:
        words = f"`{param}` must be above 0 and at most {_MAX_COST:,}; got {excerpt(value)}."
        raise InvalidOption(words, param=param)
    return float(value)


def _check_priority(value: object, param: str) -> int | None:
    if value is None or is_priority(value):
        return value
    words = f"`{param}` must be an integer between -{MAX_PRIORITY} and {MAX_PRIORITY}"
    raise InvalidOption(f"{words}; got {excerpt(value)}.", param=param)


def _check_echo_fields(value: object, param: str) -> tuple[str, ...]:
    if value is None or value == ():  # as those of a retried batch
        return ()
    if (names := echo_field_names(value)) is None:
        raise InvalidOption(f"`{param}` must be {ECHO_FIELDS}; got {excerpt(value)}.", param=param)
    return names


def _check_choice(value: object, param: str) -> OnInvalidLine:
    if value is None or value == "fail":
        return "fail"
    if value == "skip":
        return "skip"
    raise InvalidOption(f'`{param}` must be "fail" or "skip"; got {excerpt(value)}.', param=param)


def _check_boolean(value: object, param: str) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise InvalidOption(f"`{param}` must be true or false; got {excerpt(value)}.", param=param)


def _problem_of_url(value: object) -> str | None:
    if not isinstance(value, str):
        return "it is not a string"
    if len(value) > MAX_URL_CHARS:
        return f"it has {len(value):,} characters, and the limit is {MAX_URL_CHARS:,}"
    if not _URL_CHARS.fullmatch(value):
        return "spaces, backslashes and non-ASCII characters must be percent-encoded"
    try:
        parts = urlsplit(value)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "it is not a valid URL"
    if parts.scheme != "https":
        return "it must start with https://"
    if "@" in parts.netloc:
        return "it must not contain a user name or password"
    if not host or port == 0:
        return "it has no host"
    if is_internal_host(host):
        return "its host is not public"
    return None


def _check_expiry(policy: object) -> int | None:
    param = "output_expires_after"
    if policy is None:
        return None
    if not isinstance(policy, Mapping) or policy.get("anchor") != "created_at":
        raise InvalidOption(
            f'`{param}` must be an object whose `anchor` is "created_at".', param=param
        )
    seconds = policy.get("seconds")
    if type(seconds) is not int or not MIN_EXPIRY_SECONDS <= seconds <= MAX_EXPIRY_SECONDS:
        raise InvalidOption(
            f"`{param}.seconds` must be an integer between {MIN_EXPIRY_SECONDS:,} and "
            f"{MAX_EXPIRY_SECONDS:,}; got {excerpt(seconds)}.",
            param=f"{param}.seconds",
        )
    return seconds


def _check_metadata(metadata: object) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise _bad_metadata("must be an object of strings")
    if len(metadata) > MAX_METADATA_PAIRS:
        raise _bad_metadata(
            f"has {len(metadata)} key-value pairs; the limit is {MAX_METADATA_PAIRS}"
        )
    for name, value in metadata.items():
        if not (_is_text(name) and _is_text(value)):
            raise _bad_metadata(f"must contain only strings; see {excerpt(name)}")
        if not name:
            raise _bad_metadata("has an empty key")  # DynamoDB does not allow it
        if len(name) > MAX_METADATA_KEY_CHARS:
            raise _bad_metadata(
                f"has a key of {len(name)} characters; the limit is {MAX_METADATA_KEY_CHARS}"
            )
        if len(value) > MAX_METADATA_VALUE_CHARS:
            raise _bad_metadata(
                f"has {len(value)} characters at {excerpt(name)}; "
                f"the limit is {MAX_METADATA_VALUE_CHARS}"
            )
    return dict(metadata)


def _bad_metadata(words: str) -> InvalidOption:
    return InvalidOption(f"`metadata` {words}.", param="metadata")


def _is_text(value: object) -> bool:
    """Say whether a value is a string that can be stored, without lone surrogates."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False


def _decode(text: str) -> str:
    """Return the text of an RFC 2047 value; an invalid one is returned unchanged."""
    try:
        return str(make_header(decode_header(text)))
    except (MessageError, LookupError, UnicodeError, ValueError):
        return text
