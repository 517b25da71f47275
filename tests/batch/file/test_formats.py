"""Detection of file formats, and conversion to plain JSONL."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import random
import tarfile
import tracemalloc
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.batch.file import formats
from tidemill.batch.file.formats import (
    HEAD_BYTES,
    FileFormat,
    as_lines,
    detect_format,
    gunzip,
    open_lines,
)
from tidemill.batch.file.lines import FormatError, read_lines

GOOD = b'{"custom_id":"a","url":"/v1/completions","body":{"prompt":"x"}}'

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=25,
)
REQUESTS = st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=4), min_size=1, max_size=6)
BLANK = st.text(" \t\r\n", max_size=3)


def lines_of(data: bytes, piece_bytes: int = 2**20) -> bytes:
    """Return the JSONL of a file that is read in chunks of this size."""
    pieces = (data[start : start + piece_bytes] for start in range(0, len(data), piece_bytes))
    return b"".join(as_lines(detect_format(data[:HEAD_BYTES]), pieces))


def error_of(data: bytes, piece_bytes: int = 2**20) -> FormatError:
    """Return the error of a file."""
    with pytest.raises(FormatError) as caught:
        lines_of(data, piece_bytes)
    return caught.value


def tar_of(data: bytes) -> bytes:
    """Return a tar archive with one file."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo("in.jsonl")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def zip_of(*names: str) -> bytes:
    """Return a zip archive with entries of these names."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return packed.getvalue()


@pytest.mark.parametrize(
    ("head", "word"),
    [
        (b"PK\x03\x04\x14\x00", "zip archive"),
        (b"PK\x05\x06" + bytes(18), "zip archive"),
        (zip_of("[Content_Types].xml", "xl/workbook.xml"), "Excel workbook: save it as CSV UTF-8"),
        (zip_of("docProps/app.xml", "xl/worksheets/sheet1.xml"), "save it as CSV UTF-8"),
        (zip_of("[Content_Types].xml", "word/document.xml"), "Word document: save its text"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "Excel workbook"),
        (tar_of(GOOD), "tar archive"),
        (gzip.compress(tar_of(GOOD)), "tar archive"),
        (gzip.compress(gzip.compress(GOOD)), "gzip twice"),
        (b"\x28\xb5\x2f\xfd\x04", "zstd"),
        (b"BZh91AY", "bzip2"),
        (b"PAR1\x15", "Parquet"),
        (b"PARE" + bytes(100), "an encrypted Parquet table: write it without encryption"),
        (GOOD.decode().encode("utf-16"), "UTF-16"),
        (GOOD.decode().encode("utf-16-le"), "UTF-16"),
        (GOOD.decode().encode("utf-16-be"), "UTF-16"),
        (gzip.compress("[]".encode("utf-16-le")), "UTF-16"),
    ],
)
def test_unsupported_formats_are_named(head: bytes, word: str) -> None:
    """The first bytes decide, and the message says what to do."""
    with pytest.raises(FormatError, match=word):
        detect_format(head)


@pytest.mark.parametrize(
    ("head", "word"),
    [
        (b'{\n  "custom_id": "a"\n}', "over several lines"),
        (b'{"custom_id": "a",\n "url": "b"}', "over several lines"),
        (b"custom_id,method,url,body\r\n1,POST", "CSV"),
        (gzip.compress(b"a,b\n1,2\n"), "CSV"),
        (b"\0" * 100, "NUL"),
        (b'["custom_id", "body"]\n["a", {}]\n', "JSON arrays"),
        (b"[1]\n" + GOOD, "JSON arrays"),
        (GOOD + b",\n" + GOOD + b",\n", "A comma follows each line"),
        (json.dumps(GOOD.decode()).encode() + b"\n", "a JSON string that contains an object"),
        (b'"a, b","c"\n', "CSV"),
    ],
)
def test_other_text_is_a_suspicion(head: bytes, word: str) -> None:
    """It becomes the error only if no line is a request."""
    suspicion = detect_format(head).suspicion
    assert suspicion is not None
    assert word in suspicion


@pytest.mark.parametrize("head", [b"", b"\n\n", b"{}", GOOD, GOOD + b"\n{", b"\xef\xbb\xbf{}"])
def test_nothing_is_guessed_about_others(head: bytes) -> None:
    """Their lines are parsed as requests."""
    assert detect_format(head) == FileFormat()


@pytest.mark.parametrize(
    ("head", "form"),
    [
        (b"[]", FileFormat(is_array=True)),
        (b"\xef\xbb\xbf \r\n[{", FileFormat(is_array=True)),
        (gzip.compress(b""), FileFormat(is_gzip=True)),
        (gzip.compress(GOOD), FileFormat(is_gzip=True)),
        (gzip.compress(GOOD)[:3], FileFormat(is_gzip=True)),
        (gzip.compress(b" ["), FileFormat(is_gzip=True, is_array=True)),
    ],
)
def test_supported_files_have_a_format(head: bytes, form: FileFormat) -> None:
    """Files that are shorter than the head are detected too."""
    assert detect_format(head) == form
    assert not form.is_plain
    assert form.unit == ("element" if form.is_array else "line")


@given(
    REQUESTS,
    st.integers(1, 40),
    st.sampled_from(["", "gzip"]),
    st.lists(BLANK, min_size=4, max_size=4),
)
def test_an_array_gives_its_elements_back(
    requests: list[dict[str, Any]], piece_bytes: int, packed: str, blank: list[str]
) -> None:
    """Their bytes stay the same, whatever the white space and the chunks."""
    lines = [json.dumps(request, ensure_ascii=len(request) % 2 == 0) for request in requests]
    separator = f"{blank[0]},{blank[1]}"
    data = f"{blank[2]}[{blank[3]}{separator.join(lines)}]{blank[3]}".encode()
    found = lines_of(gzip.compress(data) if packed else data, piece_bytes)
    assert found == "".join(f"{line}\n" for line in lines).encode()


@given(st.text('[]{}",\\ a\n:1', max_size=30), st.integers(1, 9))
def test_the_result_for_an_array_does_not_depend_on_the_chunks(text: str, piece_bytes: int) -> None:
    """Lines and errors are equal, and valid JSON gives lines."""
    data = f"[{{{text}]".encode()

    def result(size: int) -> bytes | str:
        try:
            return lines_of(data, size)
        except FormatError as exc:
            return exc.message

    whole = result(2**20)
    assert result(piece_bytes) == whole
    try:
        requests = json.loads(data)
    except ValueError:
        return
    assert isinstance(whole, bytes)
    assert [json.loads(line) for line in whole.split(b"\n")[:-1]] == requests


@given(REQUESTS, st.integers(1, 40), st.sampled_from([1, 2, "\t"]))
def test_elements_over_many_lines_become_one_each(
    requests: list[dict[str, Any]], piece_bytes: int, indent: int | str
) -> None:
    """Pretty printers write such elements."""
    found = lines_of(json.dumps(requests, indent=indent).encode(), piece_bytes)
    assert [json.loads(line) for line in found.decode().split("\n")[:-1]] == requests


@given(st.binary(max_size=300), st.integers(1, 40), st.integers(0, 300), st.integers(0, 9))
def test_gunzip_returns_every_byte(
    content: bytes, piece_bytes: int, middle: int, num_zeros: int
) -> None:
    """Several members are joined, and trailing zeros are ignored."""
    packed = gzip.compress(content[:middle]) + gzip.compress(content[middle:]) + bytes(num_zeros)
    pieces = [packed[start : start + piece_bytes] for start in range(0, len(packed), piece_bytes)]
    assert b"".join(gunzip(pieces)) == content


@given(st.integers(1, 10**9), st.integers(0, 2**32))
def test_truncated_gzip_is_detected(seed: int, where: int) -> None:
    """The message contains the number of bytes."""
    packed = gzip.compress(f'{{"custom_id": "{seed}"}}\n'.encode() * 50)
    kept = 2 + where % (len(packed) - 2)
    error = error_of(packed[:kept])
    assert f"truncated after {kept:,} bytes" in error.message
    assert error.offset == kept


def test_damaged_gzip_is_reported_with_its_place() -> None:
    """One changed byte breaks the checksum, another one a block."""
    lines = b"".join(b'{"custom_id": "%d"}\n' % (number * 7919 % 10**6) for number in range(10**5))
    packed = bytearray(gzip.compress(lines))
    packed[-6] ^= 1
    assert "incorrect data check" in error_of(bytes(packed)).message
    packed[10] = 0xFF
    error = error_of(bytes(packed))
    assert "The gzip data is damaged at byte " in error.message
    assert error.offset is not None
    assert 10 < error.offset <= 65_536


@pytest.mark.parametrize("padding", [b"", random.Random(1).randbytes(2**18)])
@pytest.mark.parametrize("filler", [b"\n", b"{}\n", b"\0"])
def test_a_decompression_bomb_is_refused_anywhere(
    padding: bytes, filler: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before it has expanded; ordinary data before it gains nothing."""
    monkeypatch.setattr(formats, "_MAX_EXCESS_BYTES", 2**20)
    packed = gzip.compress(padding + filler * (2**23 // len(filler)))
    unfolded = bytearray()
    with pytest.raises(FormatError, match="expands to more than 400 times its size"):
        unfolded.extend(itertools.chain.from_iterable(gunzip([packed])))
    assert len(unfolded) < len(padding) + 2**22


def test_requests_that_share_a_long_prompt_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real files stay far below the ratio, however repetitive they are."""
    monkeypatch.setattr(formats, "_MAX_EXCESS_BYTES", 2**18)
    prompt = random.Random(1).randbytes(14_000).hex()
    lines = "".join(
        json.dumps({"custom_id": str(number), "body": {"prompt": f"{prompt} {number}"}}) + "\n"
        for number in range(300)
    ).encode()
    assert b"".join(gunzip([gzip.compress(lines)])) == lines


def test_trailing_bytes_after_gzip_are_refused() -> None:
    """No part of a file is ignored silently."""
    assert "damaged" in error_of(gzip.compress(GOOD) + b"hello").message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[", "The array is empty but does not end: its `]` is missing."),
        (b"[{},]", "Element 1 of the array is the last one, but a comma follows it: remove it."),
        (b"[{},,{}]", "Element 2 of the array is empty: remove the extra comma."),
        (b"[{} {}]", "Element 1 of the array has no comma after it."),
        (b"[{}}]", "Element 1 of the array has no comma after it."),
        (b"[{}, 1}]", "Element 2 of the array has an unmatched `}`."),
        (b"[{},{}", "Element 2 of the array is the last one, but the array's `]` is missing."),
        (b'[{},{"a":[1,2', "Element 2 of the array does not end"),
        (b'[{},{"a":"\\', "Element 2 of the array does not end"),
        (b'[{"a":"b\nc"}]', "Element 1 of the array has a line break in a string"),
        (b"[{}]\n[{}]", "Element 1 of the array is the array's last, but more text"),
        (b"[{}],{}", "Element 1 of the array is the array's last, but more text"),
    ],
)
@pytest.mark.parametrize("piece_bytes", [1, 100])
def test_a_broken_array_is_reported_with_its_element(
    data: bytes, words: str, piece_bytes: int
) -> None:
    """The elements before it do not matter."""
    assert words in error_of(data, piece_bytes).message


def test_other_values_are_lines_too() -> None:
    """Their errors are reported when the lines are parsed."""
    assert lines_of(b'[{},1, "a,]", null ,[[2],\n3], {]]') == (
        b'{}\n1\n"a,]"\nnull \n[[2], 3]\n{]\n'
    )
    assert lines_of(b" [ ] ") == b""


def test_a_file_is_opened_as_lines() -> None:
    """Plain files are returned unchanged; numbers of others count elements or lines."""
    plain, packed = io.BytesIO(GOOD + b"\n\n" + GOOD), io.BytesIO()
    assert open_lines(FileFormat(), plain) is plain
    packed.write(gzip.compress(plain.getvalue()))
    lines = list(read_lines(open_lines(FileFormat(is_gzip=True), packed)))
    assert [(line.number, line.data) for line in lines] == [(1, GOOD), (3, GOOD)]


@pytest.mark.parametrize("form", [FileFormat(is_gzip=False), FileFormat(is_array=True)])
def test_an_endless_line_is_not_read_to_its_end(
    form: FileFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be compressed to a few bytes."""
    monkeypatch.setattr("tidemill.batch.file.lines.MAX_SKIPPED_BYTES", 2**22)

    def endless() -> Iterator[bytes]:
        yield b'[{}, {"a": "' if form.is_array else b'{}\n{"a": "'
        while True:
            yield b"x" * 2**20

    with pytest.raises(FormatError, match=r"2 is longer than any request may be"):
        for _ in as_lines(form, endless()):
            pass


def test_memory_is_bounded_by_a_few_chunks() -> None:
    """The amount of compressed data does not matter."""
    line = GOOD.replace(b"x", b"x" * 1000)
    packed = gzip.compress(b"[" + b",\n".join([line] * 20_000) + b"]")
    tracemalloc.start()
    try:
        num_bytes = sum(len(piece) for piece in as_lines(detect_format(packed), (packed,)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert num_bytes == 20_000 * (len(line) + 1)
    assert peak < num_bytes / 2
