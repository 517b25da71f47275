"""Object keys, all built here: no part of a request ever becomes a path as it stands."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Final
from urllib.parse import quote

from .errors import InvalidOption
from .model import Outputs

# The tenant of uploads to the bucket, unless their folder names another.
DROP_TENANT = "default"

INPUT_PREFIX = "input/"
_OUTPUT_PREFIX = "output/"
_SUFFIX = ".jsonl"
ERRORS_SUFFIX = ".errors.jsonl"
RECIPE_SUFFIX: Final = ".recipe.toml"
_TABLE = ".table"
MAX_KEY_BYTES = 1024
TENANT: Final = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"
_TENANT: Final = re.compile(TENANT, re.ASCII)
_TENANT_HINT = "A tenant's name is a letter or digit and up to 63 more, or any of . _ @ -."


def check_tenant(name: str) -> str:
    """Return the name of a tenant, which stands in its keys; raises InvalidOption."""
    if _TENANT.fullmatch(name) is None:
        raise InvalidOption(_TENANT_HINT, param="tenant")
    return name


def batch_id_of_drop(bucket: str, key: str, sequencer: str) -> str:
    """Return the id of the batch that one upload makes: the same for a repeated event."""
    return f"batch_{_digest('drop', bucket, key, sequencer)}"


def batch_id_of_request(tenant: str, idempotency_key: str) -> str:
    """Return the id of the batch that one API request makes: the same when it is repeated."""
    return f"batch_{_digest('api', tenant, idempotency_key)}"


def outputs_of_drop(key: str) -> Outputs | None:
    """Return where the results of `input/<name>` go, or None for a key that is under no `input/`.

    Of `x.jsonl` they begin with `x`, of everything else with its whole name, such as `x.jsonl.gz`,
    so that files that differ in their form alone have results of their own. Results whose names
    would be longer than S3's 1,024 bytes have one made up: such a file is refused.
    """
    name = key.removeprefix(INPUT_PREFIX)
    if name in {"", key}:
        return None
    outputs = _outputs_of_name(name)
    if _is_too_long(outputs):
        return _outputs(f"{_OUTPUT_PREFIX}name-too-long-{_digest('too long', key)}")
    return outputs


def tenant_of_drop(key: str) -> str:
    """Return the tenant that owns `input/<tenant>/…`, where folders name tenants.

    An upload in no folder, or in one that can be no tenant's name, is DROP_TENANT's.
    """
    folder, slash, _ = key.removeprefix(INPUT_PREFIX).partition("/")
    return folder if slash and _TENANT.fullmatch(folder) else DROP_TENANT


def invalid_tenant_reason(key: str) -> str | None:
    """Return why the folder of an upload names no tenant, or None if it is in none or names one."""
    folder, slash, _ = key.removeprefix(INPUT_PREFIX).partition("/")
    if not slash or _TENANT.fullmatch(folder):
        return None
    return (
        f"The first folder below {INPUT_PREFIX} is the tenant, and {folder[:100]!r} can be none's "
        f"name. {_TENANT_HINT}"
    )


def is_folder(key: str, num_bytes: int) -> bool:
    """Say whether an object is but the mark of a folder, as consoles make them."""
    return key.endswith("/") and num_bytes == 0


def invalid_key_reason(key: str) -> str | None:
    """Return why an upload cannot have this key, or None if it can."""
    outputs = _outputs_of_name(key.removeprefix(INPUT_PREFIX))
    if _is_too_long(outputs):
        room = MAX_KEY_BYTES - len(f"{_OUTPUT_PREFIX}{ERRORS_SUFFIX}")
        return f"The name is too long for those of its results: {room} bytes are the most."
    if outputs.output_key.endswith(ERRORS_SUFFIX):
        return (
            f"The results would be named as the errors of another file, {ERRORS_SUFFIX}: give the "
            "upload another name."
        )
    return None


def results_name(outputs: Outputs) -> str:
    """Return what uploads have in common whose results are the same objects: a key for the newest.

    It is that of `input/<path>.jsonl`, the same that `input/<path>` has.
    """
    return f"{INPUT_PREFIX}{outputs.output_key.removeprefix(_OUTPUT_PREFIX)}"


def is_drop(outputs: Outputs) -> bool:
    """Say whether results are those of an upload to the bucket, and of no API request."""
    return outputs.output_key.startswith(_OUTPUT_PREFIX)


def outputs_of_request(tenant: str, batch_id: str) -> Outputs:
    """Return where the results of a batch go that the API made."""
    return _outputs(f"{_files_prefix(tenant)}{batch_id}")


def recipe_key(key: str) -> str:
    """Return the key of the recipe beside a table: its own with another ending."""
    folder, slash, name = key.rpartition("/")
    stem = name.removesuffix(".gz")
    return f"{folder}{slash}{stem.rpartition('.')[0] or stem}{RECIPE_SUFFIX}"


def is_recipe_key(key: str) -> bool:
    """Say whether an upload is a recipe, which is no file of requests."""
    return key.endswith(RECIPE_SUFFIX)


def table_key(outputs: Outputs, form: str) -> str:
    """Return where a table of a batch's rows goes: named as the input if that has its suffix.

    No other upload's results have that name; raises InvalidOption for an input that has one of
    these already, or a name too long.
    """
    stem = outputs.output_key.removesuffix(_SUFFIX)
    suffix = ".ndjson" if form == "jsonl" else f".{form}"
    if stem.lower().endswith(f"{_TABLE}{suffix}"):
        raise InvalidOption(
            f"The table would be named as that of another file, {_TABLE}{suffix}: give the upload "
            "another name.",
            param="key",
        )
    key = stem if stem.lower().endswith(suffix) else f"{stem}{_TABLE}{suffix}"
    if len(key.encode()) > MAX_KEY_BYTES:
        raise InvalidOption("The name is too long for that of its table.", param="key")
    return key


def file_key(tenant: str, file_id: str) -> str:
    """Return where a file lies that a tenant has uploaded by the API."""
    return f"{_files_prefix(tenant)}{file_id}"


def _files_prefix(tenant: str) -> str:
    """Return the prefix of all that the API makes for a tenant, and for no other."""
    return f"files/{check_tenant(tenant)}/"


def upload_prefix(upload_id: str) -> str:
    """Return the prefix of the small parts of an upload; what follows it is the part's id."""
    return f"work/uploads/{upload_id}/"


def parity_prefix(model: str) -> str:
    """Return the prefix of a model's parity results, which its workers share."""
    return f"work/parity/{quote(model, safe='')}/"


def results_prefix(tenant: str) -> str:
    """Return the prefix of all results that are kept for a tenant's later batches."""
    return f"results/{check_tenant(tenant)}/"


def work_prefix(batch_id: str) -> str:
    """Return the prefix of everything in flight of a batch."""
    return f"work/{batch_id}/"


def converted_key(batch_id: str) -> str:
    """Return where the lines of a batch lie whose input is no plain JSONL."""
    return f"{work_prefix(batch_id)}input.jsonl"


def intake_key(batch_id: str, name: str) -> str:
    """Return where a unit of intake leaves what it has found, for the runs that come after it."""
    return f"{work_prefix(batch_id)}intake/{name}"


def ids_key(batch_id: str, name: str) -> str:
    """Return where a unit of intake leaves the custom ids that it has seen."""
    return f"{intake_key(batch_id, name)}.ids"


def shard_prefix(batch_id: str, shard: int) -> str:
    """Return the prefix of everything in flight of a shard."""
    return f"{work_prefix(batch_id)}{shard:07}/"


def part_prefix(batch_id: str, shard: int) -> str:
    """Return the prefix of the parts of a shard; they list in the order of fence and number."""
    return f"{shard_prefix(batch_id, shard)}part-"


def part_key(batch_id: str, shard: int, fence: int, number: int) -> str:
    """Return the key of a part: the `number`th (from 0) that the owner with this fence wrote."""
    return f"{part_prefix(batch_id, shard)}{fence:06}-{number:06}"


def segment_key(batch_id: str, shard: int, fence: int, kind: str, number: int) -> str:
    """Return the key of a sealed segment; `kind` is `output` or `errors`, `number` from 0."""
    return f"{shard_prefix(batch_id, shard)}{kind}-{fence:06}-{number:04}"


def seal_key(batch_id: str, shard: int, fence: int) -> str:
    """Return the key of what tells which rows the sealed segments have."""
    return f"{shard_prefix(batch_id, shard)}rows-{fence:06}"


def fill_key(batch_id: str, shard: int, fence: int) -> str:
    """Return the key of the rows of lines that were never run; it lists as no part."""
    return f"{shard_prefix(batch_id, shard)}fill-{fence:06}"


def joined_prefix(batch_id: str, kind: str) -> str:
    """Return the prefix of the objects that many segments of a kind become on their way to one."""
    return f"{work_prefix(batch_id)}joined/{kind}-"


def event_id(batch_id: str, status: str) -> str:
    """Return the id of the event that a batch has come to a status: the same however often told."""
    return f"evt_{_digest('event', batch_id, status)}"


def result_file_id(batch_id: str, kind: str) -> str:
    """Return the id under which clients find a batch's `output`, `error` or `table` object."""
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
