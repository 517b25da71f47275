"""Weight cache on this machine's disk: each object is downloaded once for all processes.

Each location has a folder, `<cache>/<name>`:

    blobs/<id>                  the bytes of one object; the ID depends on its ETag and size
    snapshots/<revision>/<name> hard links to blobs: the model as it was at one time
    in-use/<revision>           shared lock of every process that may read the snapshot
    lock                        exclusive lock of the process that changes the folder

A blob gets its name when it is complete, and a snapshot is named by its revision: an existing
file under these names needs no download. Locks are `flock`s and end with their process, even if
it is killed. transformers reads a model's revision from a folder named `snapshots`.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO

from ...aws.sync import Aws
from ...errors import AwsError
from .download import DownloadItem, download
from .manifest import (
    Location,
    Manifest,
    WeightFile,
    WeightsRefused,
    check_region,
    find_weights,
    refusal,
)

_POLL_SECONDS = 0.5
_MAX_NAME = 100


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """Download progress; `is_waiting` while another process of this machine downloads."""

    num_bytes: int = 0
    total_bytes: int = 0
    is_waiting: bool = False


OnProgress = Callable[[DownloadProgress], None]


@contextmanager
def local_weights(
    aws: Aws, location: Location, cache: Path, on_progress: OnProgress, region: str | None = None
) -> Iterator[Path]:
    """Yield a folder with the current model of a location, downloaded if necessary.

    While entered, no other process removes the folder. `on_progress` is called about every second
    until the folder is complete. Raises WeightsRefused for unavailable weights, and for weights
    outside `region`, if given; an empty `region` is that of the client.
    """
    if region is not None:
        aws.run(check_region(location, region or aws.clients["s3"].meta.region_name))
    manifest = aws.run(find_weights(location))
    home = _Home(cache / _folder_name(location), manifest)
    with ExitStack() as held:
        try:
            home.make()
            with _locked(home.lock, on_progress):
                held.enter_context(home.hold())
                if missing := home.missing():
                    home.remove_others()
                    home.check_space(missing, cache)
                    home.fetch(aws, missing, on_progress)
                home.link()
        except AwsError as exc:
            raise refusal(location, exc) from exc
        except OSError as exc:
            reason = exc.strerror or exc
            raise WeightsRefused(f"{location} cannot be stored in {cache}: {reason}") from exc
        yield home.snapshot


@dataclass(frozen=True, slots=True)
class _Home:
    """Cache folder of one location, and the requested revision."""

    folder: Path
    manifest: Manifest

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    @property
    def snapshot(self) -> Path:
        return self.folder / "snapshots" / self.manifest.revision

    def make(self) -> None:
        """Create the missing folders."""
        for name in ("blobs", "in-use", "snapshots"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def hold(self) -> IO[str]:
        """Lock the snapshot against removal until the returned file is closed."""
        file = (self.folder / "in-use" / self.manifest.revision).open("a")
        fcntl.flock(file, fcntl.LOCK_SH)
        return file

    def blob(self, file: WeightFile) -> Path:
        """Return the path of an object's blob."""
        name = sha256(f"{file.etag} {file.num_bytes}".encode()).hexdigest()[:40]
        return self.folder / "blobs" / name

    def missing(self) -> dict[Path, WeightFile]:
        """Return the missing objects by blob; deduplicated by content."""
        blobs = {self.blob(file): file for file in self.manifest.files}
        return {blob: file for blob, file in blobs.items() if not _has(blob, file)}

    def remove_others(self) -> None:
        """Remove unused snapshots, and blobs without a snapshot."""
        for snapshot in (self.folder / "snapshots").iterdir():
            in_use = self.folder / "in-use" / snapshot.name
            if snapshot != self.snapshot and _is_free(in_use):
                shutil.rmtree(snapshot)
                in_use.unlink()
        wanted = {self.blob(file) for file in self.manifest.files}
        for blob in (self.folder / "blobs").iterdir():
            if blob not in wanted and blob.stat().st_nlink == 1:
                blob.unlink()

    def check_space(self, missing: dict[Path, WeightFile], cache: Path) -> None:
        """Raise WeightsRefused if the disk is too small for the missing objects."""
        needed = sum(file.num_bytes for file in missing.values())
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise WeightsRefused(
                f"not enough space for {self.manifest.location} in {cache}: {gigabytes(needed)} "
                f"needed, {gigabytes(free)} free"
            )

    def fetch(self, aws: Aws, missing: dict[Path, WeightFile], on_progress: OnProgress) -> None:
        """Download the missing objects; complete ones are retained even if the rest fails."""
        location = self.manifest.location
        here = self.manifest.num_bytes - sum(file.num_bytes for file in missing.values())

        wanted = [
            DownloadItem(location.prefix + file.name, file.etag, file.num_bytes, blob)
            for blob, file in missing.items()
        ]
        download(
            aws.clients["s3"],
            location.bucket,
            wanted,
            lambda num_bytes: on_progress(
                DownloadProgress(here + num_bytes, self.manifest.num_bytes)
            ),
        )

    def link(self) -> None:
        """Link every blob into the snapshot."""
        self.snapshot.mkdir(exist_ok=True)
        for file in self.manifest.files:
            path, blob = self.snapshot / file.name, self.blob(file)
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.samefile(blob):
                continue
            path.unlink(missing_ok=True)
            path.hardlink_to(blob)


def gigabytes(num_bytes: int) -> str:
    """Return `16.1 GB`; three decimals below a tenth."""
    value = num_bytes / 1e9
    return f"{value:,.1f} GB" if value >= 0.1 else f"{value:.3f} GB"


@contextmanager
def _locked(path: Path, on_progress: OnProgress) -> Iterator[None]:
    """Hold an exclusive lock."""
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                on_progress(DownloadProgress(is_waiting=True))
                time.sleep(_POLL_SECONDS)
        yield


def _is_free(path: Path) -> bool:
    """Return whether no process holds a lock on this file."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _has(path: Path, file: WeightFile) -> bool:
    """Return whether a file exists with the size of the object."""
    try:
        return path.stat().st_size == file.num_bytes
    except FileNotFoundError:
        return False


def _folder_name(location: Location) -> str:
    """Return a unique, readable folder name."""
    where = f"{location.bucket}/{location.prefix}"
    words = re.sub(r"[^\w.-]+", "--", where).strip("-")[:_MAX_NAME]
    return f"{words}-{sha256(where.encode()).hexdigest()[:8]}"
