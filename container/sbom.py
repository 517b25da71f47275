"""Bill of materials of the image, in CycloneDX: `python sbom.py SITE-PACKAGES DPKG-STATUS FOLDER`.

Writes `sbom.json` with the Python and Debian packages, and `requirements.txt` with the Python
packages only, for pip-audit. It uses the standard library only, because it runs in the image's
build.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

_DISTRIBUTION = "debian-12"


def python_packages(site: Path) -> Iterator[dict[str, Any]]:
    """Yield a component for each distribution installed in a folder."""
    for found in metadata.distributions(path=[str(site)]):
        name = re.sub(r"[-_.]+", "-", found.name).lower()
        component = _component(name, found.version, f"pkg:pypi/{name}@{quote(found.version)}")
        if licence := found.metadata.get("License-Expression"):
            component["licenses"] = [{"expression": licence}]
        yield component


def debian_packages(status: Path) -> Iterator[dict[str, Any]]:
    """Yield a component for each package that dpkg has installed."""
    for paragraph in status.read_text(encoding="utf-8").split("\n\n"):
        fields = dict(
            line.split(": ", 1)
            for line in paragraph.splitlines()
            if ": " in line and not line.startswith(" ")
        )
        if fields.get("Status", "").endswith(" installed"):
            name, version = fields["Package"], fields["Version"]
            # Packages whose source package has another name, under which Debian lists
            # vulnerabilities.
            source = fields.get("Source", name).partition(" ")[0]
            purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}"
            query = f"arch={fields['Architecture']}&distro={_DISTRIBUTION}&upstream={quote(source)}"
            yield _component(name, version, f"{purl}?{query}")


def bill(components: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a CycloneDX 1.6 document; the same packages give the same document."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": "image", "name": "tidemill"}},
        "components": sorted(components, key=lambda component: component["bom-ref"]),
    }


def _component(name: str, version: str, purl: str) -> dict[str, Any]:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def main(site: str, status: str, folder: str) -> None:
    """Write both files."""
    python = list(python_packages(Path(site)))
    document = bill([*python, *debian_packages(Path(status))])
    Path(folder, "sbom.json").write_text(f"{json.dumps(document, indent=1)}\n", encoding="utf-8")
    pins = sorted(f"{each['name']}=={each['version'].partition('+')[0]}\n" for each in python)
    Path(folder, "requirements.txt").write_text("".join(pins), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
