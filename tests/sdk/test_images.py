"""Vectors of images by `Engine.embed_images`, and as a column of a table."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.engine.tasks.two_towers import TinyTowers
from tidemill import Engine
from tidemill.sdk.image_items import items_of_images


def test_python_and_tables_have_vectors_of_images(tmp_path: Path) -> None:
    """An image may be a path, bytes, a URL or Pillow's; a table in a file may have paths."""
    towers = TinyTowers("clip", tmp_path)
    levels = np.random.default_rng(1).integers(0, 256, (2, 40, 50, 3), dtype=np.uint8)
    images = [Image.fromarray(one) for one in levels]
    paths = [tmp_path / f"{number}.png" for number in range(2)]
    for image, path in zip(images, paths, strict=True):
        image.save(path)
    urls = [f"data:image/png;base64,{b64encode(path.read_bytes()).decode()}" for path in paths]
    content = [{"type": "image_url", "image_url": {"url": "{{ picture }}"}}]
    with Engine(str(tmp_path), device="cpu", dtype="float32") as engine:
        texts = engine.embed(["tide"], progress=False)
        found = engine.embed_images(
            [str(paths[0]), paths[1].read_bytes(), urls[0], images[1], paths[0]], progress=False
        )
        assert len(engine.embed_images([images[0].convert("CMYK")], progress=False)) == 1
        recipe: dict[str, Any] = {
            "url": "/v1/embeddings",
            "messages": [{"role": "user", "content": content}],
            "progress": False,
        }
        table = engine.answer_table({"picture": [*urls, "nothing"]}, **recipe)
        named = tmp_path / "pictures.csv"
        named.write_text("picture\n0.png\nnone.png\n")
        of_file = engine.answer_table(named, **recipe)
        [unread] = engine.answer_table({"picture": ["0.png"]}, **recipe).column("error")
    expected = towers.images(images)
    assert np.abs(found - expected[[0, 1, 0, 1, 0]]).max() < 1e-4
    assert np.abs(texts - towers.texts(["tide"])).max() < 1e-4
    *vectors, none = table.column("embedding").to_pylist()
    assert np.abs(np.array(vectors) - expected).max() < 1e-4
    assert none is None
    assert np.abs(of_file.column("embedding")[0].as_py() - expected[0]).max() < 1e-4
    assert "`none.png` does not exist" in of_file.column("error")[1].as_py()
    assert "must be an http://" in unread.as_py()
    assert "must be an http://, https:// or s3:// URL" in table.column("error")[2].as_py()


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("a.png", "must be a list of images"),
        (None, "must be a list of images; got null"),
        ({"a": 1}, "must be a list of images; got an object"),
        (Image.new("L", (1, 1)), "must be a list of images"),
        ([1], "must be a URL, a path or bytes; got 1"),
        ([None], "must be a URL, a path or bytes; got null"),
    ],
)
def test_another_value_is_a_type_error(images: Any, message: str) -> None:
    """No request is sent."""
    with pytest.raises(TypeError, match=message):
        [*items_of_images(lambda bodies, **_: [*bodies], images, "", {}, progress=False)]
