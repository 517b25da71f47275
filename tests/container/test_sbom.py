"""The bill of materials of an image, made by the script that its build runs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.container.dockerfile import ROOT, of_stage, only

# In dpkg's format; the second is removed, except for its settings.
STATUS = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Source: glibc (2.36-9)
Version: 2.36-9+deb12u10
Description: GNU C Library
 Depends: not this one

Package: perl
Status: deinstall ok config-files
Architecture: amd64
Version: 5.36

Package: libzstd1
Status: install ok installed
Architecture: amd64
Version: 1:1.5.4
"""


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Return a folder with both files, of a Python with two distributions."""
    site = tmp_path / "site"
    for name, version, more in (
        ("Some_Thing", "2.13.0+cpu", "License-Expression: Apache-2.0\n"),
        ("other", "1.0", ""),
    ):
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{more}"
        )
    (tmp_path / "status").write_text(STATUS)
    script = runpy.run_path(str(ROOT / "container" / "sbom.py"))
    script["main"](str(site), str(tmp_path / "status"), str(tmp_path))
    return tmp_path


def test_the_bill_has_what_is_installed(written: Path) -> None:
    """Each package once, by the name that scanners look for; what was removed is not there."""
    found: dict[str, Any] = json.loads((written / "sbom.json").read_text())
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert [component["purl"] for component in found["components"]] == [
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64&distro=debian-12&upstream=glibc",
        "pkg:deb/debian/libzstd1@1%3A1.5.4?arch=amd64&distro=debian-12&upstream=libzstd1",
        "pkg:pypi/other@1.0",
        "pkg:pypi/some-thing@2.13.0%2Bcpu",
    ]
    assert found["components"][-1]["licenses"] == [{"expression": "Apache-2.0"}]
    assert len({component["bom-ref"] for component in found["components"]}) == 4


def test_pip_audit_gets_versions_that_the_index_knows(written: Path) -> None:
    """A build's local version is not in the index."""
    text = (written / "requirements.txt").read_text()
    assert text == "other==1.0\nsome-thing==2.13.0\n"


def test_the_build_reads_what_the_image_gets() -> None:
    """The folder of its libraries, and the list of dpkg of the system that it copies."""
    assert only("inventory", "RUN").words.split()[1:] == [
        "../sbom.py",
        "/opt/libraries/lib/python3.11/site-packages",
        "../status",
        ".",
    ]
    [status] = [it.words for it in of_stage("inventory", "COPY") if it.flags.get("from")]
    assert status == "--from=system /var/lib/dpkg/status /inventory/status"
    assert "bookworm" in only("", "ARG").words  # which is debian-12
