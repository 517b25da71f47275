"""The image's libraries and our code, built once as the Dockerfile says."""

from __future__ import annotations

import pytest

from tests.container.dockerfile import Image, build_image


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Return what the build stage leaves; it takes about a minute, most of it torch."""
    return build_image(tmp_path_factory.mktemp("image"))
