"""Headers of GGUF files: their contents, and how broken files are refused."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.engine.families import build
from tests.engine.gguf_files import write_gguf
from tidemill.engine.errors import ModelRefused
from tidemill.engine.storage.gguf.header import read_header
from tidemill.engine.storage.gguf.unpacked import description_folder, gguf_file


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_WEIGHTS_CACHE", str(tmp_path / "weights"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the bytes of a whole file."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(file, build("LlamaConfig")).read_bytes()


def refused(path: Path) -> str:
    """Return why a file is refused, in one sentence or two."""
    with pytest.raises(ModelRefused) as exc:
        description_folder(path)
    message = str(exc.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_a_header_is_read_as_the_gguf_package_reads_it(tmp_path: Path, whole: bytes) -> None:
    """Every value is equal, and so is each tensor's name, shape, type and offset."""
    file = tmp_path / "x.gguf"
    file.write_bytes(whole)
    header, expected = read_header(file), gguf.GGUFReader(file)
    fields = {key: one for key, one in expected.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == {key: field.contents() for key, field in fields.items()}
    assert header.architecture == "llama"
    for tensor in expected.tensors:
        own = header.tensors[tensor.name]
        assert own.shape == tuple(reversed([int(size) for size in tensor.shape]))
        assert (own.kind, own.start) == (tensor.tensor_type, tensor.data_offset)


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    """The kinds are numbers of all widths, strings, booleans and arrays of them."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(kind, 7)
    writer.add_float64("double", 0.1)
    writer.add_array("texts", ["é", ""])
    writer.add_array("switches", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_header(tmp_path / "x.gguf").metadata
    assert [value for value in metadata.values() if value == 7] == [7] * 8
    assert metadata["double"] == 0.1
    assert (metadata["texts"], metadata["switches"]) == (["é", ""], [True, False])


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.2, 0.5, 0.999])
def test_a_truncated_file_is_refused_wherever_it_ends(
    tmp_path: Path, whole: bytes, share: float
) -> None:
    """It holds for cuts within its header and within its tensors."""
    file = tmp_path / "x.gguf"
    file.write_bytes(whole[: int(len(whole) * share)])
    assert "is truncated" in refused(file)


def test_other_formats_are_refused(tmp_path: Path, whole: bytes) -> None:
    """Other formats, versions and byte orders, and deeply nested arrays, are refused."""
    file = tmp_path / "x.gguf"
    file.write_bytes(b"PK\x03\x04 a zip")
    assert "is not a GGUF file" in refused(file)
    file.write_bytes(b"")
    assert "is not a GGUF file" in refused(file)
    file.write_bytes(whole[:4] + struct.pack("<I", 1) + whole[8:])
    assert "is version 1 of the format, which is not supported" in refused(file)
    file.write_bytes(whole[:4] + struct.pack(">I", 3) + whole[8:])
    assert "is big-endian, which is not supported" in refused(file)
    damaged = np.frombuffer(whole, np.uint8).copy()
    damaged[40:400] = 255
    file.write_bytes(damaged.tobytes())
    assert "is truncated or damaged" in refused(file)
    nested = struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 9) + struct.pack("<IQ", 9, 1) * 5000
    file.write_bytes(whole[:4] + nested)
    assert "is truncated or damaged" in refused(file)


def test_a_split_file_is_refused(tmp_path: Path) -> None:
    """Its metadata decides, not its name."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "is one of 3 parts of a split GGUF" in refused(tmp_path / "x.gguf")


def test_a_type_that_the_gguf_package_cannot_read_is_refused(tmp_path: Path, whole: bytes) -> None:
    """These are integer types and types of later versions."""
    file = tmp_path / "x.gguf"
    name = b"output_norm.weight"
    place = whole.index(name) + len(name) + 4 + 8  # its number of dimensions, and the only one
    for kind, called in ((26, "I32"), (999, "999")):
        file.write_bytes(whole[:place] + struct.pack("<I", kind) + whole[place + 4 :])
        assert f"output_norm.weight has type {called}, which" in refused(file)


def test_an_architecture_that_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    """A mixture of experts under Llama's name is refused, too."""
    for architecture, experts, words in (
        ("mamba", 0, "the GGUF architecture 'mamba' is not supported (supported: llama, qwen2,"),
        ("llama", 8, "GGUF files of Mixtral (llama with experts) are not supported"),
    ):
        file = tmp_path / f"{architecture}.gguf"
        writer = gguf.GGUFWriter(file, architecture)
        for key in ("embedding_length", "attention.head_count", "feed_forward_length"):
            writer.add_uint32(f"{architecture}.{key}", 64)
        for key in ("block_count", "context_length"):
            writer.add_uint32(f"{architecture}.{key}", 2)
        writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
        writer.add_uint32(f"{architecture}.expert_count", experts)
        writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert words in refused(file)


def test_a_folder_of_several_files_is_refused_and_a_projector_does_not_count(
    tmp_path: Path,
) -> None:
    """Weights in safetensors come first."""
    folder = tmp_path / "model"
    folder.mkdir()
    assert gguf_file(str(folder)) is None
    (folder / "a-Q4_0.gguf").touch()
    (folder / "mmproj-a.gguf").touch()
    assert gguf_file(str(folder)) == folder / "a-Q4_0.gguf"
    (folder / "a-Q8_0.gguf").touch()
    with pytest.raises(ModelRefused, match=r"has 2 GGUF files \(a-Q4_0.gguf, a-Q8_0.gguf\)"):
        gguf_file(str(folder))
    (folder / "model.safetensors").touch()
    assert gguf_file(str(folder)) is None
