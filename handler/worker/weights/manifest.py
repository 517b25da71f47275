"""Manifest of model weights in S3: the objects that a model needs, pinned by ETag."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Any, Self

from pydantic_core import from_json

from tidemill.batch.errors import HandlerError
from tidemill.protocol.gguf_names import SUFFIX, gguf_names, is_part

from ...aws.calls import Call, Operation
from ...errors import AwsError

SCHEME = "s3://"

_CONFIG = "config.json"
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER = "adapter_model.safetensors"
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Configurations, tokenizers and chat templates of any family; no file with code.
_WANTED_SUFFIXES = frozenset({".jinja", ".json", ".model", ".tiktoken", ".txt"})
# Files next to the weights: heads of decision models and of BGE-M3, and ColBERT's settings.
_HEADS = frozenset(
    {
        *("joint_head.safetensors", "readout.safetensors"),
        *("sparse_linear.pt", "colbert_linear.pt", "artifact.metadata"),
    }
)
# The list of a sentence-transformers model's modules, each with its files in a folder.
_MODULES = "modules.json"
# Files of decision models whose encoder's config and tokenizer are in separate folders.
_NESTED = frozenset({"rl_agent_config.json", "julia_config.json"})
_FOLDERS = ("encoder/", "tokenizer/")
_ENCODER = f"{_FOLDERS[0]}{_CONFIG}"
_NOT_WANTED = re.compile(r".*\.index\.json")
_NO_BUCKET = frozenset({"404", "NoSuchBucket"})
_DENIED = frozenset({"403", "AccessDenied", "Forbidden", "AllAccessDisabled"})


class WeightsRefused(HandlerError):
    """Weights that are unavailable or not a model; the message has the location and the reason."""

    code = "weights_refused"


@dataclass(frozen=True, slots=True)
class Location:
    """A prefix in a bucket; `prefix` is empty or ends with a slash."""

    bucket: str
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse `s3://bucket/prefix`, with or without a trailing slash."""
        bucket, _, prefix = url.removeprefix(SCHEME).partition("/")
        if not url.startswith(SCHEME) or not bucket:
            raise WeightsRefused(f"{url} is not a weights URL: use s3://bucket/prefix")
        prefix = prefix.strip("/")
        return cls(bucket, f"{prefix}/" if prefix else "")

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.prefix}"


@dataclass(frozen=True, slots=True, order=True)
class WeightFile:
    """One object of a model; `name` is its key without the prefix, `etag` its version."""

    name: str
    num_bytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """All objects that a model needs, as they were listed."""

    location: Location
    files: tuple[WeightFile, ...]

    @property
    def num_bytes(self) -> int:
        """Return the total size."""
        return sum(file.num_bytes for file in self.files)

    @property
    def revision(self) -> str:
        """Return 40 hexadecimal digits that change whenever an object does."""
        lines = [f"{file.name}\t{file.num_bytes}\t{file.etag}\n" for file in sorted(self.files)]
        return sha256("".join(lines).encode()).hexdigest()[:40]


class WeightsDenied(WeightsRefused):
    """Weights that the current role may not read; another role may."""

    code = "weights_denied"


def check_region(location: Location, region: str) -> Operation[None]:
    """Raise WeightsRefused for weights in another region than this one."""
    try:
        answer = yield Call("s3", "head_bucket", {"Bucket": location.bucket})
    except AwsError as exc:
        raise refusal(location, exc) from exc
    found = answer.get("BucketRegion") or region
    if found != region:
        raise WeightsRefused(
            f"{location} is in {found}, but its workers run in {region}: each start would transfer "
            f"it between regions, which is slow and costs money. Copy it to {region}, or allow it "
            "with the model's `weights_region` (for a worker, --weights-region)"
        )


def find_weights(location: Location) -> Operation[Manifest]:
    """Return the objects that the model or adapter at a location needs; raises WeightsRefused."""
    try:
        found = yield from _list(location)
        if not found and location.prefix.lower().endswith(f"{SUFFIX}/"):
            folder = str(location).rpartition("/")[0].rpartition("/")[0]
            raise WeightsRefused(
                f"{location} is a file: use the prefix that contains the GGUF file ({folder})"
            )
        if not found:
            raise WeightsRefused(f"no objects found under {location}")
        config = _CONFIG
        if found.keys() & _NESTED:
            config = _ENCODER
            for folder in _FOLDERS:
                found |= yield from _list(location, folder)
        modules = yield from _module_files(location, found)
        if (gguf := _gguf_names(location, found)) is not None:
            tensors: Iterable[str] = gguf
        elif not found.keys() & {config, _ADAPTER_CONFIG}:
            raise WeightsRefused(f"{location} is not a model: {config} not found")
        else:
            tensors = yield from _tensor_names(location, found)
    except AwsError as exc:
        raise refusal(location, exc) from exc
    others = [name for name in found if _is_wanted(name)]
    found |= modules
    return Manifest(location, tuple(found[name] for name in sorted({*others, *tensors, *modules})))


def refusal(location: Location, error: AwsError) -> WeightsRefused:
    """Return the user-facing error for an error of S3."""
    if error.aws_code in _NO_BUCKET:
        return WeightsRefused(f"bucket {location.bucket} of {location} does not exist")
    if error.aws_code in _DENIED and "kms:" in str(error):
        return WeightsDenied(
            f"access to the KMS key that encrypts {location} is denied: grant kms:Decrypt on it "
            "(the model's `weights_key`), also in the key's policy"
        )
    if error.aws_code in _DENIED:
        return WeightsDenied(
            f"access to {location} is denied: grant s3:ListBucket on the bucket and s3:GetObject "
            "on the objects"
        )
    return WeightsRefused(f"{location} cannot be read: {error}")


def _list(location: Location, folder: str = "") -> Operation[dict[str, WeightFile]]:
    """Return the objects directly under the prefix, or in a folder of it, by name."""
    arguments: dict[str, Any] = {
        "Bucket": location.bucket,
        "Prefix": location.prefix + folder,
        "Delimiter": "/",
    }
    found: dict[str, WeightFile] = {}
    while True:
        response = yield Call("s3", "list_objects_v2", arguments)
        for item in response.get("Contents", ()):
            name = item["Key"].removeprefix(location.prefix)
            # The folder's own name is a marker that some consoles create.
            if name != folder:
                found[name] = WeightFile(name, item["Size"], item["ETag"])
        if not response.get("IsTruncated"):
            return found
        arguments["ContinuationToken"] = response["NextContinuationToken"]


def _gguf_names(location: Location, found: Mapping[str, WeightFile]) -> list[str] | None:
    """Return the only GGUF file of a model without safetensors; None for another model."""
    if found.keys() & {_WHOLE, _INDEX, _ADAPTER_CONFIG}:
        return None
    files = gguf_names(found)
    if any(map(is_part, files)):
        raise WeightsRefused(
            f"{location} has a split GGUF, which is not supported: merge the parts with "
            "`llama-gguf-split --merge`"
        )
    if len(files) > 1:
        raise WeightsRefused(
            f"{location} has {len(files)} GGUF files ({files[0]}, {files[1]}"
            f"{', …' if len(files) > 2 else ''}): put the one to serve under a separate prefix"
        )
    return files or None


def _tensor_names(location: Location, found: Mapping[str, WeightFile]) -> Operation[Iterable[str]]:
    """Return the objects that contain the tensors, and their index if there are several.

    They are selected as transformers does: many repositories contain a second copy. An adapter
    may have a tokenizer and a config.json next to it.
    """
    if _ADAPTER_CONFIG in found:
        if _ADAPTER not in found:
            raise WeightsRefused(
                f"{location} has no {_ADAPTER}, which its {_ADAPTER_CONFIG} requires"
            )
        return [_ADAPTER]
    if _WHOLE in found:
        return [_WHOLE]
    if _INDEX not in found:
        raise WeightsRefused(
            f"{location} has neither {_WHOLE} nor {_INDEX}: other weight formats are not supported"
        )
    index = yield from _read(location, found[_INDEX])
    try:
        names = sorted(set(from_json(index)["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise WeightsRefused(f"{location}{_INDEX} is not an index of weights") from exc
    missing = [name for name in names if name not in found]
    if missing or not names:
        what = missing[0] if missing else "a file"
        raise WeightsRefused(
            f"{location} lacks {what} ({len(missing)} of {len(names)} files in {_INDEX} missing)"
        )
    return [_INDEX, *names]


def _module_files(
    location: Location, found: Mapping[str, WeightFile]
) -> Operation[dict[str, WeightFile]]:
    """Return the configs and weights in the folders that a list of modules names."""
    if _MODULES not in found:
        return {}
    data = yield from _read(location, found[_MODULES])
    try:
        paths = {PurePosixPath(module.get("path", "")) for module in from_json(data)}
    except (ValueError, TypeError, AttributeError) as exc:
        raise WeightsRefused(f"{location}{_MODULES} is not a list of modules") from exc
    if any(path.is_absolute() or ".." in path.parts for path in paths):
        raise WeightsRefused(f"{location}{_MODULES} has a path outside the model's folder")
    files: dict[str, WeightFile] = {}
    for path in sorted(path for path in paths if path.parts):
        inside = yield from _list(location, f"{path}/")
        wanted = (f"{path}/{name}" for name in (_CONFIG, _WHOLE))
        files |= {name: inside[name] for name in wanted if name in inside}
    return files


def _read(location: Location, file: WeightFile) -> Operation[bytes]:
    """Return the bytes of an object as it was listed."""
    key = {"Bucket": location.bucket, "Key": location.prefix + file.name}
    response = yield Call("s3", "get_object", key | {"IfMatch": file.etag})
    body: bytes = response["Body"]
    return body


def _is_wanted(name: str) -> bool:
    is_text = PurePosixPath(name).suffix in _WANTED_SUFFIXES
    return name in _HEADS or (is_text and not _NOT_WANTED.fullmatch(name))
