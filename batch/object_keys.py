"""Object keys, all built here: no part of a request is ever used in a path unescaped."""

from __future__ import annotations

import re
from dataclasses import replace
from hashlib import blake2b
from typing import Final
from urllib.parse import quote

from .errors import InvalidOption
from .model import Outputs

# The tenant of uploads to the bucket, unless their folder names another.
DROP_TENANT = "default"

INPUT_PREFIX = "input/"
MEDIA_PREFIX: Final = "media/"
_OUTPUT_PREFIX = "output/"
_SUFFIX = ".jsonl"
ERRORS_SUFFIX = ".errors.jsonl"
RECIPE_SUFFIX: Final = ".recipe.toml"
CALIBRATION_SUFFIX: Final = ".calibration.json"
_TABLE = ".table"
MAX_KEY_BYTES = 1024
TENANT: Final = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"
_TENANT: Final = re.compile(TENANT, re.ASCII)
_TENANT_HINT = (
    "A tenant's name has 1 to 64 letters, digits or . _ @ -, and starts with a letter or digit."
)


def check_tenant(name: str) -> str:
    """Return a tenant's name, which its keys contain; raises InvalidOption."""
    if _TENANT.fullmatch(name) is None:
        raise InvalidOption(_TENANT_HINT, param="tenant")
    return name


def batch_id_of_drop(bucket: str, key: str, sequencer: str) -> str:
    """Return the ID of the batch that an upload creates: the same for a repeated event."""
    return f"batch_{_digest('drop', bucket, key, sequencer)}"


def batch_id_of_request(tenant: str, idempotency_key: str) -> str:
    """Return the ID of the batch that an API request creates: the same for a repeated request."""
    return f"batch_{_digest('api', tenant, idempotency_key)}"


def outputs_of_drop(key: str) -> Outputs | None:
    """Return the keys of the results of `input/<name>`, or None for a key outside `input/`.

    For `x.jsonl` they start with `x`, for other files with the whole name, such as `x.jsonl.gz`,
    so that files that differ only in their format have separate results. If a result's name
    would exceed S3's 1,024 bytes, a made-up name replaces it, and the file is refused.
    """
    name = key.removeprefix(INPUT_PREFIX)
    if name in {"", key}:
        return None
    outputs = _outputs_of_name(name)
    if _is_too_long(outputs):
        return _outputs(f"{_OUTPUT_PREFIX}name-too-long-{_digest('too long', key)}")
    return outputs


def tenant_of_drop(key: str) -> str:
    """Return the tenant that owns `input/<tenant>/…`, if folders name tenants.

    DROP_TENANT owns uploads outside a folder, or in a folder that cannot be a tenant's name.
    """
    folder, slash, _ = key.removeprefix(INPUT_PREFIX).partition("/")
    return folder if slash and _TENANT.fullmatch(folder) else DROP_TENANT


def invalid_tenant_reason(key: str) -> str | None:
    """Return why an upload's folder is not a tenant's name; None if it is, or without a folder."""
    folder, slash, _ = key.removeprefix(INPUT_PREFIX).partition("/")
    if not slash or _TENANT.fullmatch(folder):
        return None
    return (
        f"The first folder under {INPUT_PREFIX} must be a tenant's name, and {folder[:100]!r} is "
        f"not one. {_TENANT_HINT}"
    )


def is_folder(key: str, num_bytes: int) -> bool:
    """Say whether an object is an empty folder marker created by a console."""
    return key.endswith("/") and num_bytes == 0


def invalid_key_reason(key: str) -> str | None:
    """Return why an upload cannot have this key, or None if it can."""
    outputs = _outputs_of_name(key.removeprefix(INPUT_PREFIX))
    if _is_too_long(outputs):
        room = MAX_KEY_BYTES - len(f"{_OUTPUT_PREFIX}{ERRORS_SUFFIX}")
        return f"The name is too long for the names of its results: the limit is {room} bytes."
    if outputs.output_key.endswith(ERRORS_SUFFIX):
        return (
            f"The results would have the name of another file's errors, {ERRORS_SUFFIX}: rename "
            "the upload."
        )
    return None


def results_name(outputs: Outputs) -> str:
    """Return the common name of uploads with the same result objects: a key for the newest one.

    It is the key of `input/<path>.jsonl`, which `input/<path>` shares.
    """
    return f"{INPUT_PREFIX}{outputs.output_key.removeprefix(_OUTPUT_PREFIX)}"


def is_drop(outputs: Outputs) -> bool:
    """Say whether results belong to an upload to the bucket, not to an API request."""
    return outputs.output_key.startswith(_OUTPUT_PREFIX)


def outputs_of_request(tenant: str, batch_id: str) -> Outputs:
    """Return the keys of the results of an API batch."""
    return _outputs(f"{_files_prefix(tenant)}{batch_id}")


def moved_outputs(outputs: Outputs, tenant: str, batch_id: str) -> Outputs:
    """Return other keys for a batch's results, which no upload's results have."""
    moved = outputs_of_request(tenant, batch_id)
    if outputs.table_key is None:
        return moved
    suffix = outputs.table_key.rpartition(".")[2]
    return replace(moved, table_key=table_key(moved, "jsonl" if suffix == "ndjson" else suffix))


def recipe_key(key: str) -> str:
    """Return the key of a table's recipe, which is next to it with another suffix."""
    folder, slash, name = key.rpartition("/")
    stem = name.removesuffix(".gz")
    return f"{folder}{slash}{stem.rpartition('.')[0] or stem}{RECIPE_SUFFIX}"


def is_of_table(key: str) -> bool:
    """Say whether an upload belongs to a table: its recipe, or a saved calibration."""
    return key.endswith((RECIPE_SUFFIX, CALIBRATION_SUFFIX))


def table_key(outputs: Outputs, form: str) -> str:
    """Return the key of a batch's output table: its name is the input's if that has the suffix.

    No other upload's results have that name. Raises InvalidOption for an input that has such a
    name already, or a name that is too long.
    """
    stem = outputs.output_key.removesuffix(_SUFFIX)
    suffix = ".ndjson" if form == "jsonl" else f".{form}"
    if stem.lower().endswith(f"{_TABLE}{suffix}"):
        raise InvalidOption(
            f"The table would have the name of another file's table, {_TABLE}{suffix}: rename the "
            "upload.",
            param="key",
        )
    key = stem if stem.lower().endswith(suffix) else f"{stem}{_TABLE}{suffix}"
    if len(key.encode()) > MAX_KEY_BYTES:
        raise InvalidOption("The name is too long for the name of its table.", param="key")
    return key


def file_key(tenant: str, file_id: str) -> str:
    """Return the key of a file that a tenant uploaded through the API."""
    return f"{_files_prefix(tenant)}{file_id}"


def _files_prefix(tenant: str) -> str:
    """Return the prefix of everything that the API creates for a tenant."""
    return f"files/{check_tenant(tenant)}/"


def media_prefix(tenant: str) -> str:
    """Return the prefix of the recordings and images that a tenant's requests may name."""
    return f"{MEDIA_PREFIX}{check_tenant(tenant)}/"


def upload_prefix(upload_id: str) -> str:
    """Return the prefix of an upload's small parts; the part's ID follows it."""
    return f"work/uploads/{upload_id}/"


def parity_prefix(model: str) -> str:
    """Return the prefix of a model's parity results, which its workers share."""
    return f"work/parity/{quote(model, safe='')}/"


def results_prefix(tenant: str) -> str:
    """Return the prefix of the results that a tenant's later batches can reuse."""
    return f"results/{check_tenant(tenant)}/"


def work_prefix(batch_id: str) -> str:
    """Return the prefix of a batch's work in progress."""
    return f"work/{batch_id}/"


def converted_key(batch_id: str) -> str:
    """Return the key of the converted JSONL of a batch whose input is in another format."""
    return f"{work_prefix(batch_id)}input.jsonl"


def intake_key(batch_id: str, name: str) -> str:
    """Return the key where a unit of intake stores its findings for later runs."""
    return f"{work_prefix(batch_id)}intake/{name}"


def ids_key(batch_id: str, name: str) -> str:
    """Return the key where a unit of intake stores the custom IDs that it has seen."""
    return f"{intake_key(batch_id, name)}.ids"


def shard_prefix(batch_id: str, shard: int) -> str:
    """Return the prefix of a shard's work in progress."""
    return f"{work_prefix(batch_id)}{shard:07}/"


def part_prefix(batch_id: str, shard: int) -> str:
    """Return the prefix of a shard's parts; they list in the order of fence and number."""
    return f"{shard_prefix(batch_id, shard)}part-"


def part_key(batch_id: str, shard: int, fence: int, number: int) -> str:
    """Return the key of a part: the `number`th (from 0) written by the owner with this fence."""
    return f"{part_prefix(batch_id, shard)}{fence:06}-{number:06}"


def draft_prefix(batch_id: str, shard: int) -> str:
    """Return the prefix of a shard's drafts: parts with rows that a second model may replace."""
    return f"{shard_prefix(batch_id, shard)}draft-"


def draft_key(batch_id: str, shard: int, fence: int, number: int) -> str:
    """Return the key of a draft, as `part_key` does."""
    return f"{draft_prefix(batch_id, shard)}{fence:06}-{number:06}"


def segment_key(batch_id: str, shard: int, fence: int, kind: str, number: int) -> str:
    """Return the key of a sealed segment; `kind` is `output` or `errors`, `number` from 0."""
    return f"{shard_prefix(batch_id, shard)}{kind}-{fence:06}-{number:04}"


def seal_key(batch_id: str, shard: int, fence: int) -> str:
    """Return the key of the index of the rows in the sealed segments."""
    return f"{shard_prefix(batch_id, shard)}rows-{fence:06}"


def fill_key(batch_id: str, shard: int, fence: int) -> str:
    """Return the key of the rows of lines that never ran; it is not listed as a part."""
    return f"{shard_prefix(batch_id, shard)}fill-{fence:06}"


def kept_drafts_key(batch_id: str, shard: int, fence: int) -> str:
    """Return the key of drafts that became rows; like that of `fill_key`, it is not a part."""
    return f"{shard_prefix(batch_id, shard)}kept-{fence:06}"


def threshold_key(batch_id: str) -> str:
    """Return the key of the work so far on the threshold of a cascade."""
    return f"{work_prefix(batch_id)}threshold"


def joined_prefix(batch_id: str, kind: str) -> str:
    """Return the prefix of the intermediate objects when many segments of a kind are joined."""
    return f"{work_prefix(batch_id)}joined/{kind}-"


def event_id(batch_id: str, status: str) -> str:
    """Return the ID of the event that a batch has reached a status: the same for each delivery."""
    return f"evt_{_digest('event', batch_id, status)}"


def result_file_id(batch_id: str, kind: str) -> str:
    """Return the file ID of a batch's `output`, `error` or `table` object."""
    return f"file-{_digest('result', batch_id, kind)}"


def _outputs(stem: str) -> Outputs:
    return Outputs(f"{stem}.jsonl", f"{stem}{ERRORS_SUFFIX}", f"{stem}.batch.json")


def _outputs_of_name(name: str) -> Outputs:
    return _outputs(f"{_OUTPUT_PREFIX}{name.removesuffix(_SUFFIX) or name}")


def _is_too_long(outputs: Outputs) -> bool:
    names = (outputs.output_key, outputs.error_key, outputs.report_key)
    return max(len(name.encode("utf-8", "surrogatepass")) for name in names) > MAX_KEY_BYTES


def _digest(*parts: str) -> str:
    digest = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.hexdigest()
