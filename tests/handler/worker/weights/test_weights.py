"""Weights from S3: what is chosen, what is fetched and kept, and what is refused in which words."""

from __future__ import annotations

import fcntl
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from tests.emulators import Emulator
from tidemill import demo
from tidemill.engine.storage.hub import config_of
from tidemill.handler.aws.sync import Aws
from tidemill.handler.errors import AwsError, ObjectChanged
from tidemill.handler.worker.weights import cache as weights_cache
from tidemill.handler.worker.weights.cache import DownloadProgress, gigabytes, local_weights
from tidemill.handler.worker.weights.download import DownloadItem, download
from tidemill.handler.worker.weights.manifest import (
    Location,
    Manifest,
    WeightFile,
    WeightsRefused,
    find_weights,
    refusal,
)

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
DEMO_FILES = sorted(path.name for path in demo.MODEL_PATH.iterdir())


def index_of(*names: object) -> bytes:
    """Return an index of tensors in these files."""
    return json.dumps({"weight_map": {f"t{n}": name for n, name in enumerate(names)}}).encode()


@dataclass
class Place:
    """A prefix on an emulator, a cache for it, and every requested object."""

    aws: Aws
    location: Location
    cache: Path
    requests: list[str] = field(default_factory=list)
    progress: list[DownloadProgress] = field(default_factory=list)

    def put(self, **files: bytes) -> None:
        """Upload files; `_` stands for a dot in their names."""
        self.put_all({name.replace("_", "."): body for name, body in files.items()})

    def put_all(self, files: dict[str, bytes]) -> None:
        """Upload files by their names."""
        for name, body in files.items():
            key = self.location.prefix + name
            self.aws.clients["s3"].put_object(Bucket=self.location.bucket, Key=key, Body=body)

    def put_demo(self) -> None:
        """Upload the demo model."""
        self.put_all({path.name: path.read_bytes() for path in demo.MODEL_PATH.iterdir()})

    def find(self) -> Manifest:
        """Return what the model there needs."""
        return self.aws.run(find_weights(self.location))

    def fetch(self, held: ExitStack | None = None) -> Path:
        """Return the folder with the model; it stays in use as long as `held` lives."""
        with ExitStack() as stack:
            return (held or stack).enter_context(
                local_weights(self.aws, self.location, self.cache, self.progress.append)
            )

    @property
    def home(self) -> Path:
        """The one folder in the cache."""
        [home] = self.cache.iterdir()
        return home

    @property
    def requested_names(self) -> list[str]:
        """Names of the requested objects, without repetitions; clears them."""
        names = sorted({key.removeprefix(self.location.prefix) for key in self.requests})
        self.requests.clear()
        return names


@pytest.fixture
def place(emulator: Emulator, tmp_path: Path) -> Iterator[Place]:
    """Return an empty prefix in a separate bucket."""
    aws = Aws(emulator.client)
    bucket = f"weights-{uuid4().hex[:10]}"
    aws.clients["s3"].create_bucket(Bucket=bucket)
    place = Place(aws, Location(bucket, "models/m/"), tmp_path / "cache")

    def note(params: dict[str, Any], **_: object) -> None:
        place.requests.append(params["Key"])

    events = aws.clients["s3"].meta.events
    events.register("provide-client-params.s3.GetObject", note, unique_id="requests")
    yield place
    events.unregister("provide-client-params.s3.GetObject", unique_id="requests")


def test_an_adapter_comes_with_its_tensors(place: Place) -> None:
    """PEFT writes no model's config; pickles and training files are not downloaded."""
    place.put_all(dict.fromkeys(["adapter_config.json", "README.md", "adapter_model.bin"], b"x"))
    with pytest.raises(WeightsRefused, match=r"has no adapter_model\.safetensors"):
        place.find()
    names = ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]
    place.put_all(dict.fromkeys([*names, "optimizer.pt"], b"x"))
    assert sorted(path.name for path in place.fetch().iterdir()) == names


@pytest.mark.parametrize("described", ["rl_agent_config.json", "julia_config.json"])
def test_a_decision_model_comes_with_its_folders(place: Place, described: str) -> None:
    """The encoder's config and the tokenizer are in separate folders, without code."""
    place.put_all(dict.fromkeys([described, "model.safetensors", "encoder/"], b"x"))
    with pytest.raises(WeightsRefused, match=r"is not a model: encoder/config\.json not found"):
        place.find()
    nested = ["encoder/config.json", "tokenizer/tokenizer.json"]
    place.put_all(dict.fromkeys([*nested, "encoder/model.py", "code/config.json"], b"y"))
    folder = place.fetch()
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert sorted(map(str, files)) == sorted([*nested, described, "model.safetensors"])
    assert config_of(folder).read_bytes() == b"y"


def test_a_model_of_vectors_comes_with_its_modules(place: Place) -> None:
    """Each folder in the list has a config, and perhaps weights; some heads are next to it."""
    place.put_all(dict.fromkeys(["config.json", "model.safetensors"], b"x"))
    paths = ["", "1_Pooling", "deep/2_Dense", "3_Normalize"]
    modules = json.dumps([{"idx": n, "path": path} for n, path in enumerate(paths)]).encode()
    inside = ["1_Pooling/config.json", "deep/2_Dense/config.json", "deep/2_Dense/model.safetensors"]
    heads = ["artifact.metadata", "colbert_linear.pt", "sparse_linear.pt"]
    others = ["deep/2_Dense/pytorch_model.bin", "onnx/config.json", "1_Pooling/code.py"]
    place.put_all({"modules.json": modules, **dict.fromkeys([*inside, *heads, *others], b"y")})
    folder = place.fetch()
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    wanted = ["config.json", "model.safetensors", "modules.json", *inside, *heads]
    assert sorted(map(str, files)) == sorted(wanted)
    for broken in (b"{", b"7", b"[7]", b'{"path": ""}', b'[{"path": 7}]'):
        place.put_all({"modules.json": broken})
        with pytest.raises(WeightsRefused, match=r"modules\.json is not a list of modules"):
            place.find()
    for outside in ("/etc", "../other", "a/../../b"):
        place.put_all({"modules.json": json.dumps([{"path": outside}]).encode()})
        with pytest.raises(WeightsRefused, match=r"has a path outside the model's folder"):
            place.find()


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://b", "b", ""),
        ("s3://b/", "b", ""),
        ("s3://b/m", "b", "m/"),
        ("s3://b/models/m/", "b", "models/m/"),
    ],
)
def test_a_location_is_read_with_and_without_a_slash(url: str, bucket: str, prefix: str) -> None:
    """A whole bucket may be one."""
    location = Location.parse(url)
    assert (location.bucket, location.prefix) == (bucket, prefix)
    assert Location.parse(str(location)) == location


@pytest.mark.parametrize("url", ["s3://", "s3:///m", "https://b/m", "m"])
def test_a_location_without_a_bucket_is_refused(url: str) -> None:
    """The error shows the format."""
    with pytest.raises(WeightsRefused, match="s3://bucket/prefix"):
        Location.parse(url)


def test_the_demo_model_comes_as_it_is(place: Place) -> None:
    """Every byte of every file, in a folder that ends with the revision."""
    place.put_demo()
    folder = place.fetch()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in demo.MODEL_PATH.iterdir()
    }
    manifest = place.find()
    assert folder.parts[-2:] == ("snapshots", manifest.revision)
    assert manifest.num_bytes == sum(path.stat().st_size for path in demo.MODEL_PATH.iterdir())
    assert place.progress[-1] == DownloadProgress(manifest.num_bytes, manifest.num_bytes)


def test_what_is_there_is_not_fetched_again(place: Place) -> None:
    """Only the listing is read at a second start."""
    place.put_demo()
    folder = place.fetch()
    assert place.requested_names == DEMO_FILES
    assert place.fetch() == folder
    assert place.requested_names == []


def test_only_an_object_that_changed_is_fetched_again(place: Place) -> None:
    """They have a new revision; the other files are the same."""
    place.put_demo()
    with ExitStack() as held:
        old = place.fetch(held)
        place.requests.clear()
        place.put_all({"chat_template.jinja": b"{{ 'new' }}"})
        new = place.fetch()
        assert place.requested_names == ["chat_template.jinja"]
        assert new != old
        assert (new / "chat_template.jinja").read_bytes() == b"{{ 'new' }}"
        assert (new / "model.safetensors").samefile(old / "model.safetensors")


def test_an_unused_snapshot_goes_when_there_is_something_to_fetch(place: Place) -> None:
    """Its exclusive bytes go with it; a snapshot in use stays."""
    place.put_demo()
    with ExitStack() as held:
        first = place.fetch(held)
        place.put_all({"config.json": b"{}"})
        place.fetch()
        place.put_all({"config.json": b"[]"})
        third = place.fetch()
        assert sorted(first.parent.iterdir()) == sorted([first, third])
        assert (first / "config.json").read_bytes() == (
            demo.MODEL_PATH / "config.json"
        ).read_bytes()
    place.put_all({"config.json": b"[1]"})
    fourth = place.fetch()
    assert list(first.parent.iterdir()) == [fourth]
    assert len(list((place.home / "blobs").iterdir())) == len(DEMO_FILES)
    assert [path.name for path in (place.home / "in-use").iterdir()] == [fourth.name]


def test_what_a_model_does_not_need_stays_where_it_is(place: Place) -> None:
    """Code, pickles, second copies of the weights and deeper folders."""
    wanted = {
        "config.json": b"{}",
        "chat_template.jinja": b"t",
        "merges.txt": b"m",
        "model.safetensors": b"w",
        "readout.safetensors": b"r",
        "tokenizer.model": b"s",
        "vocab.tiktoken": b"",
    }
    others = dict.fromkeys(
        (
            *("", "README.md", "consolidated.safetensors", "modeling_m.py", "original/config.json"),
            *("pytorch_model.bin", "training_args.pt", "pytorch_model.bin.index.json"),
        ),
        b"x",
    )
    place.put_all(wanted | others)
    folder = place.fetch()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == wanted
    assert place.requested_names == sorted(wanted)


def test_a_gguf_file_is_a_model_by_itself(place: Place) -> None:
    """A template next to it comes along; images' projectors, and GGUF next to safetensors, not."""
    gguf = {"tiny-Q4_K_M.gguf": b"GGUF", "mmproj-tiny.gguf": b"GGUF", "chat_template.jinja": b"{}"}
    place.put_all(gguf)
    wanted = ["chat_template.jinja", "tiny-Q4_K_M.gguf"]
    assert [file.name for file in place.find().files] == wanted
    assert (place.fetch() / "tiny-Q4_K_M.gguf").read_bytes() == b"GGUF"
    place.put_all({"config.json": b"{}", "model.safetensors": b"w"})
    assert [file.name for file in place.find().files] == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
    ]


def test_a_location_of_a_gguf_file_is_refused_with_its_prefix(place: Place) -> None:
    """A location names the files directly under a prefix."""
    place.put_all({"tiny.gguf": b"GGUF"})
    location = Location(place.location.bucket, f"{place.location.prefix}tiny.gguf/")
    with pytest.raises(WeightsRefused) as refused:
        place.aws.run(find_weights(location))
    folder = str(place.location).removesuffix("/")
    assert str(refused.value) == (
        f"{location} is a file: use the prefix that contains the GGUF file ({folder})"
    )


def test_tensors_in_many_files_are_those_of_the_index(place: Place) -> None:
    """Other files that look like them are not downloaded."""
    files = {name: name.encode() for name in SHARDS}
    stray = {"model-00001-of-00001.safetensors": b"stray"}
    place.put_all({"config.json": b"{}", INDEX: index_of(*SHARDS, SHARDS[0])} | files | stray)
    folder = place.fetch()
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", *SHARDS, INDEX]
    assert (folder / SHARDS[1]).read_bytes() == SHARDS[1].encode()


class Refused(NamedTuple):
    """Files under a prefix, and the error for them."""

    files: dict[str, bytes]
    words: str


@pytest.mark.parametrize(
    "case",
    [
        Refused({}, "no objects found under {}"),
        Refused({"sub/config.json": b"{}"}, "no objects found under {}"),
        Refused({"model.safetensors": b"w"}, "{} is not a model: config.json not found"),
        Refused(
            {"a.gguf": b"w", "b.gguf": b"w", "c.gguf": b"w"},
            "{} has 3 GGUF files (a.gguf, b.gguf, …): put the one to serve under a separate prefix",
        ),
        Refused(
            {"a-00001-of-00002.gguf": b"w", "a-00002-of-00002.gguf": b"w"},
            "{} has a split GGUF, which is not supported: merge the parts with "
            "`llama-gguf-split --merge`",
        ),
        Refused(
            {"config.json": b"{}", "pytorch_model.bin": b"w"},
            f"{{}} has neither model.safetensors nor {INDEX}: "
            "other weight formats are not supported",
        ),
        Refused(
            {"config.json": b"{}", INDEX: index_of(*SHARDS), SHARDS[0]: b"w"},
            f"{{}} lacks {SHARDS[1]} (1 of 2 files in {INDEX} missing)",
        ),
        Refused(
            {"config.json": b"{}", INDEX: index_of("../secret.safetensors")},
            f"{{}} lacks ../secret.safetensors (1 of 1 files in {INDEX} missing)",
        ),
        *(
            Refused({"config.json": b"{}", INDEX: body}, f"{{}}{INDEX} is not an index of weights")
            for body in (b"{", b"[]", b"{}", b'{"weight_map": []}', index_of([1]))
        ),
    ],
    ids=lambda case: case.words.split(" ", 1)[1][:30],
)
def test_a_prefix_without_a_model_is_refused(place: Place, case: Refused) -> None:
    """The error is one sentence, before anything is fetched."""
    place.put_all(case.files)
    with pytest.raises(WeightsRefused) as caught:
        place.fetch()
    assert str(caught.value) == case.words.format(place.location)
    assert not place.cache.exists()


def test_a_bucket_that_is_not_there_is_named(place: Place) -> None:
    """The error contains the location."""
    place.location = Location("no-such-bucket-here", "m/")
    with pytest.raises(WeightsRefused) as caught:
        place.find()
    words = "bucket no-such-bucket-here of s3://no-such-bucket-here/m/ does not exist"
    assert str(caught.value) == words


def test_weights_of_another_region_are_refused(ministack: Emulator, tmp_path: Path) -> None:
    """They are refused unless their region is configured, before anything is listed or fetched."""
    aws, location = Aws(ministack.client), Location(f"far-{uuid4().hex[:10]}", "m/")
    aws.clients["s3"].create_bucket(
        Bucket=location.bucket, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    for region, words in (
        ("", "is in eu-west-1, but its workers run in us-east-1"),
        ("eu-west-1", "no objects"),
    ):
        with (
            pytest.raises(WeightsRefused, match=words),
            local_weights(aws, location, tmp_path, lambda _: None, region),
        ):
            pass


def test_a_forbidden_key_is_distinguished_from_a_forbidden_bucket() -> None:
    """S3 refuses both with the same code; only the message distinguishes them."""
    words = "User: u is not authorized to perform: kms:Decrypt on resource: arn:aws:kms:…"
    refused = refusal(Location("b", "m/"), AwsError(words, aws_code="AccessDenied"))
    assert "grant kms:Decrypt on it (the model's `weights_key`)" in str(refused)


@pytest.mark.parametrize("code", ["AccessDenied", "403"])
def test_a_denied_read_names_the_missing_permissions(code: str) -> None:
    """The error names both permissions; other failures keep AWS's message."""
    finding = find_weights(Location("b", "m/"))
    next(finding)
    with pytest.raises(
        WeightsRefused, match="denied: grant s3:ListBucket on the bucket and s3:GetObj"
    ):
        finding.throw(AwsError("s3 list_objects_v2: no", aws_code=code))
    finding = find_weights(Location("b", "m/"))
    next(finding)
    with pytest.raises(WeightsRefused, match=r"s3://b/m/ cannot be read: s3 list.*: busy"):
        finding.throw(AwsError("s3 list_objects_v2: busy", aws_code="SlowDown"))


def test_a_long_listing_is_read_to_its_end() -> None:
    """All pages are read."""
    finding = find_weights(Location("b", "m/"))
    first = next(finding)
    assert "ContinuationToken" not in first.arguments
    page = {"Contents": [{"Key": "m/config.json", "Size": 2, "ETag": '"c"'}]}
    second = finding.send(page | {"IsTruncated": True, "NextContinuationToken": "more"})
    assert second.arguments["ContinuationToken"] == "more"
    with pytest.raises(StopIteration) as end:
        finding.send({"Contents": [{"Key": "m/model.safetensors", "Size": 1, "ETag": '"w"'}]})
    assert [file.name for file in end.value.value.files] == ["config.json", "model.safetensors"]


def test_a_revision_is_of_all_that_is_in_a_manifest() -> None:
    """A name, a size or an ETag more or less is another; the order and the place are not."""
    place = Location("b", "")
    files = (WeightFile("a", 1, "x"), WeightFile("b", 2, "y"))
    revision = Manifest(place, files).revision
    assert len(revision) == 40
    assert Manifest(Location("c", "m/"), files[::-1]).revision == revision
    changes = [
        files[:1],
        (files[0], WeightFile("c", 2, "y")),
        (files[0], WeightFile("b", 3, "y")),
        (files[0], WeightFile("b", 2, "z")),
    ]
    assert revision not in {Manifest(place, changed).revision for changed in changes}


def test_an_object_that_became_another_is_not_taken(place: Place, tmp_path: Path) -> None:
    """The listed object is fetched or nothing, however small it is."""
    place.put(config_json=b"old")
    [listed] = place.aws.clients["s3"].list_objects_v2(Bucket=place.location.bucket)["Contents"]
    place.put(config_json=b"new")
    wanted = DownloadItem(listed["Key"], listed["ETag"], 3, tmp_path / "file")
    with pytest.raises(ObjectChanged):
        download(place.aws.clients["s3"], place.location.bucket, [wanted], lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_an_object_of_another_size_is_not_taken(place: Place, tmp_path: Path) -> None:
    """The listing may have been wrong."""
    place.put(config_json=b"12345")
    [listed] = place.aws.clients["s3"].list_objects_v2(Bucket=place.location.bucket)["Contents"]
    wanted = DownloadItem(listed["Key"], listed["ETag"], 7, tmp_path / "file")
    with pytest.raises(ObjectChanged, match="has 5 bytes, not 7"):
        download(place.aws.clients["s3"], place.location.bucket, [wanted], lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_an_object_that_went_away_is_reported(place: Place) -> None:
    """The error has its location and S3's message."""
    place.put_demo()
    manifest = place.find()
    place.aws.clients["s3"].delete_object(
        Bucket=place.location.bucket, Key=place.location.prefix + "tokenizer.json"
    )
    finding = weights_cache.find_weights
    weights_cache.find_weights = lambda _: iter_of(manifest)  # type: ignore[assignment]
    try:
        with pytest.raises(WeightsRefused, match=r"/models/m/ cannot be read: s3 get_object"):
            place.fetch()
    finally:
        weights_cache.find_weights = finding


def iter_of(manifest: Manifest) -> Iterator[Any]:
    """Return an operation that needs no call."""
    yield from ()
    return manifest


def test_large_objects_come_in_ranges(place: Place) -> None:
    """Put together in their order."""
    body = b"".join(number.to_bytes(4) for number in range(5 * 2**20))  # 20 MiB
    place.put_all({"config.json": b"{}", "model.safetensors": body})
    folder = place.fetch()
    assert (folder / "model.safetensors").read_bytes() == body
    assert place.requests.count("models/m/model.safetensors") == 2


def test_a_disk_that_is_too_small_is_reported_before_the_download(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has both sizes; nothing is fetched."""
    place.put_demo()
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(WeightsRefused) as caught:
        place.fetch()
    needed = gigabytes(place.find().num_bytes)
    words = (
        f"not enough space for {place.location} in {place.cache}: {needed} needed, 0.001 GB free"
    )
    assert str(caught.value) == words
    assert place.requests == []


def test_an_impossible_cache_is_reported(place: Place) -> None:
    """Its folder may be a file, for example."""
    place.put_demo()
    place.cache.write_text("a file")
    with pytest.raises(WeightsRefused, match=r"cannot be stored in .*/cache: Not a directory"):
        place.fetch()


def test_what_a_kill_left_behind_is_removed_and_what_came_whole_is_kept(place: Place) -> None:
    """The next start fetches the rest."""
    place.put_demo()
    folder = place.fetch()
    blobs = place.home / "blobs"
    torn = blobs / "0123456789abcdef.12345678"
    torn.write_bytes(b"half")
    weights = folder / "model.safetensors"
    [blob] = [blob for blob in blobs.iterdir() if blob.samefile(weights)]
    shutil.rmtree(folder)
    blob.unlink()
    place.requests.clear()
    assert place.fetch() == folder
    assert set(place.requested_names) == {"model.safetensors"}
    assert weights.read_bytes() == (demo.MODEL_PATH / weights.name).read_bytes()
    assert not torn.exists()


def test_a_file_of_the_wrong_size_is_replaced(place: Place) -> None:
    """It is also replaced in the snapshot, which has another name for it."""
    place.put_demo()
    weights = place.fetch() / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(100)
    place.fetch()
    assert weights.read_bytes() == (demo.MODEL_PATH / weights.name).read_bytes()


def test_two_at_once_fetch_every_object_once(place: Place) -> None:
    """The one that comes second waits and takes what the first has fetched."""
    place.put_demo()
    found: list[Path] = []
    both = [threading.Thread(target=lambda: found.append(place.fetch())) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 2
    assert sorted(place.requests) == sorted(f"models/m/{name}" for name in DEMO_FILES)


def test_waiting_for_another_download_is_reported(place: Place) -> None:
    """Another process holds the lock; the wait can be interrupted at any moment."""
    place.put_demo()
    place.fetch()
    place.progress.clear()

    class Enough(Exception):
        """Ends the wait."""

    def watch(progress: DownloadProgress) -> None:
        place.progress.append(progress)
        raise Enough

    with (place.home / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Enough), local_weights(place.aws, place.location, place.cache, watch):
            pass
    assert place.progress == [DownloadProgress(is_waiting=True)]
    assert place.fetch().exists()


def test_locations_have_separate_folders(place: Place) -> None:
    """They are separate even if the names differ only in characters that a folder cannot have."""
    for prefix in ("a/b/", "a--b/", "a b/", f"{'x' * 500}/", ""):
        place.location = Location(place.location.bucket, prefix)
        place.put(config_json=b"{}", model_safetensors=b"w")
        place.fetch()
    assert len(list(place.cache.iterdir())) == 5
