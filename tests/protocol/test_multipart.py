"""Forms of any shape: no internal errors, and no wrong bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.protocol.errors import RequestError
from tidemill.protocol.multipart import FormReader

FORM = 'multipart/form-data; boundary="x y"'


def part_of(name: str, data: bytes, filename: str | None = None, *more: str) -> bytes:
    """Return one part as httpx and browsers write it."""
    named = f'; filename="{filename}"' if filename is not None else ""
    headers = [f'Content-Disposition: form-data; name="{name}"{named}', *more]
    return "\r\n".join([*headers, "", ""]).encode() + data


def form_of(*parts: bytes, boundary: bytes = b"x y") -> bytes:
    """Return a complete form."""
    delimiter = b"--" + boundary
    return b"".join(delimiter + b"\r\n" + part + b"\r\n" for part in parts) + delimiter + b"--\r\n"


def read(body: bytes, content_type: str = FORM, num_bytes: int = 2**20) -> dict[str, Any]:
    """Return the fields, and for `file` its bytes and name; `num_bytes` arrive at a time."""
    reader = FormReader(content_type, "file")
    starts = range(0, len(body), num_bytes)
    content = b"".join(reader.read(body[start : start + num_bytes]) for start in starts)
    reader.end()
    file = {"file": (content, reader.filename)} if reader.has_file else {}
    return {**reader.fields, **reader.lists, **file}


@given(
    st.binary(),
    st.text(st.characters(codec="utf-8", exclude_characters='"\\\r\n')),
    st.permutations(range(3)),
    st.integers(1, 80),
)
def test_every_byte_of_a_file_arrives(
    data: bytes, name: str, order: list[int], num_bytes: int
) -> None:
    """Fields may be in any order, under any name, in chunks of any size."""
    parts = [part_of("file", data, f"n{name}"), part_of("purpose", b"batch"), part_of("a", b"")]
    found = read(form_of(*(parts[index] for index in order)), num_bytes=num_bytes)
    assert found["file"][0] == data
    assert (found["purpose"], found["a"]) == ("batch", "")


@pytest.mark.parametrize(
    "data",
    [
        b"--x y",
        b"\n--x y\n",
        b"a\r\n--x\r\n",
        b"\r\n--x  y--",
        b"\r\n",
        b"\r",
        b"\r\n-",
        b"\x00\xff",
    ],
)
def test_bytes_that_resemble_the_boundary_belong_to_the_file(data: bytes) -> None:
    """Only a complete delimiter at the beginning of a line ends a part."""
    assert read(form_of(part_of("file", data, "x")))["file"][0] == data


@given(st.binary(max_size=300))
def test_other_bodies_are_refused(body: bytes) -> None:
    """They get a message; any other exception would be an internal error."""
    with pytest.raises(RequestError):
        read(body)


@given(st.data())
def test_a_damaged_form_is_refused_or_read_to_the_byte(data: st.DataObject) -> None:
    """A truncated form is refused; with bytes changed outside the file, the file stays intact."""
    content = bytes(range(256)) * 2
    form = form_of(part_of("file", content, "x"), part_of("purpose", b"batch"))
    cut = data.draw(st.integers(0, len(form) - 5))
    with pytest.raises(RequestError):
        read(form[:cut])
    at = data.draw(st.integers(0, len(form) - 1))
    damaged = form[:at] + data.draw(st.binary(min_size=1, max_size=3)) + form[at + 1 :]
    start = form.index(content)
    # The surrounding bytes decide where the file begins and ends.
    if start - 4 <= at < start + len(content) + len("\r\n--x y\r\n"):
        return
    try:
        found = read(damaged)
    except RequestError:
        return
    assert found.get("file", (content,))[0] == content


@pytest.mark.parametrize(
    "content_type",
    ["multipart/form-data; boundary=b-1", 'Multipart/Form-Data;charset=utf-8 ; BOUNDARY="b-1"'],
)
def test_a_boundary_is_found_in_every_spelling(content_type: str) -> None:
    """It may be quoted or not, in any case, among other parameters."""
    assert read(form_of(part_of("a", b"1"), boundary=b"b-1"), content_type) == {"a": "1"}


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data",
        'multipart/form-data; boundary=""',
        f'{FORM[:-1]}{"y" * 80}"',
        "\udc80",
    ],
)
def test_a_form_without_a_boundary_is_refused(content_type: str) -> None:
    """An invalid boundary is refused too."""
    with pytest.raises(RequestError, match="boundary"):
        read(form_of(part_of("a", b"1")), content_type)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([part_of("a", b"1"), part_of("a", b"2")], "more than once"),
        ([part_of("a", b"\xff")], "UTF-8"),
        ([b"\r\n1"], "no name"),
        ([b"Content-Disposition: form-data\r\n\r\n1"], "no name"),
        ([b'Content-Disposition: attachment; name="a"\r\n\r\n1'], "no name"),
        ([part_of("a", b"1", None, 'Content-Disposition: form-data; name="b"')], "two headers"),
        ([part_of("a", b"MQ==", None, "Content-Transfer-Encoding: base64")], "Encoding"),
        ([part_of(str(number), b"") for number in range(101)], "more than 100"),
    ],
)
def test_ambiguous_forms_are_refused(parts: list[bytes], words: str) -> None:
    """It is unclear which of two values is meant."""
    with pytest.raises(RequestError, match=words):
        read(form_of(*parts))


def test_a_name_is_not_taken_out_of_another() -> None:
    """`filename` contains the letters of `name`, and may come first."""
    part = b'Content-Disposition: form-data; filename="a; name=b.jsonl"; name="file"\r\n\r\n1'
    assert read(form_of(part)) == {"file": (b"1", "a; name=b.jsonl")}


@pytest.mark.parametrize("filename", ["Fälle.jsonl".encode(), "Fälle.jsonl".encode("latin-1")])
def test_names_are_decoded_as_their_client_encoded_them(filename: bytes) -> None:
    """They are UTF-8, or Latin-1 in old clients."""
    part = b'Content-Disposition: form-data; name="file"; filename="' + filename + b'"\r\n\r\n1'
    assert read(form_of(part)) == {"file": (b"1", "Fälle.jsonl")}


def test_a_file_without_a_name_is_a_file() -> None:
    """`curl -F 'file=<x.jsonl'` sends one; a text field with a name stays text."""
    found = read(form_of(part_of("file", b"1"), part_of("purpose", b"batch", "x")))
    assert found == {"file": (b"1", None), "purpose": "batch"}
