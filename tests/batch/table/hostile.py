"""Small hostile tables, recipes and templates, and a program that reads each as intake does.

Each runs in a separate process, which reports how it ended and how much memory it used.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import resource
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import ipc

CPU_SECONDS: Final = 60
_MAX_ROWS = 3
_TEXT: Final = b"text\nhello\n"
_PROMPT: Final = b"prompt = '{{ text }}'\n"
_MIB = 2**20

Case = tuple[bytes, bytes]
"""Bytes of a table and of its recipe."""


def _parquet(columns: Any, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, compression="zstd", **options)
    return sink.getvalue()


def _arrow(columns: Any, *, is_stream: bool = False, compression: str | None = None) -> bytes:
    sink, table = io.BytesIO(), pa.table(columns)
    opened = ipc.new_stream if is_stream else ipc.new_file
    with opened(sink, table.schema, options=ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _grown(data: bytes, length: int) -> bytes:
    """Return an Arrow file with a buffer that claims a length of 2 GB."""
    before = length.to_bytes(8, "little")
    start, found, end = data.rpartition(before)  # the first one is an offset
    assert found
    return start + (2_000_000_000).to_bytes(8, "little") + end


def _prompt(template: str) -> bytes:
    return b"prompt = " + json.dumps(template).encode() + b"\n"


def _zeros(number: int) -> pa.Array:
    return pa.Array.from_buffers(pa.int8(), number, [None, pa.py_buffer(bytes(number))])


def _one_list(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


def _dictionary(number: int, text: str) -> pa.Array:
    return pa.DictionaryArray.from_arrays(_zeros(number), pa.array([text]))


def _views(number: int, length: int) -> pa.Array:
    view = struct.pack("<i4sii", length, b"xxxx", 0, 0)
    buffers = [None, pa.py_buffer(view * number), pa.py_buffer(b"x" * length)]
    return pa.Array.from_buffers(pa.string_view(), number, buffers)


def _list_views(number: int, length: int) -> pa.Array:
    starts, sizes = pa.array([0] * number, pa.int32()), pa.array([length] * number, pa.int32())
    return pa.ListViewArray.from_arrays(starts, sizes, _zeros(length))


def _nested(kind: pa.DataType, levels: int) -> pa.DataType:
    for _ in range(levels):
        kind = pa.struct([("a", kind)])
    return kind


def _doubled(new: str, result: str) -> str:
    loop = f"{{% for i in range(40) %}}{{% set ns.x = {new} %}}{{% endfor %}}"
    return f"{{% set ns = namespace(x=[text]) %}}{loop}{{{{ {result} }}}}"


_DEEP: Final = {
    "if": "{% if text %}" * 250 + "x" + "{% endif %}" * 250,
    "for": "{% for a in text %}" * 25 + "{% endfor %}" * 25,
    "parentheses": "{{ " + "(" * 900 + "1" + ")" * 900 + " }}",
    "lists": "{{ " + "[" * 900 + "]" * 900 + " }}",
    "not": "{{ " + "not " * 900 + "1 }}",
    "sum": "{{ 1" + " + 1" * 900 + " }}",
    "filters": "{{ text" + "|upper" * 900 + " }}",
    "attributes": "{{ text" + ".a" * 900 + " }}",
    "conditions": "{{ " + "1 if text else " * 900 + "2 }}",
}
_ENDLESS: Final = {
    "batch": "{{ [1]|batch(1000000000)|list|length }}",
    "batch of a text": "{{ ('xy'*30000000)|batch(2)|list|length }}",
    "batch filled": "{{ [text]|batch(60000000, 'x')|list|length }}",
    "capital letters": "{{ ('a '*30000000)|title|length }}",
    "center": "{{ 'x'|center(1000000000) }}",
    "characters": "{{ ('x'*60000000)|list|length }}",
    "compared": "{% set x = 'a'*60000000 %}{% set y = x ~ '' %}{% for i in range(100) %}"
    "{{ x == y }}{% endfor %}",
    "copied": "{% set x = 'a'*60000000 %}{% for i in range(10000) %}{% set y = x[1:] %}"
    "{% endfor %}",
    "escaped": "{{ ('<'*60000000)|escape|length }}",
    "format": "{{ '%1000000000d'|format(1) }}",
    "format method": "{{ '{:1000000000d}'.format(1) }}",
    "format method, nested": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format of a map": "{{ '{a:1000000000d}'.format_map({'a': 1}) }}",
    "indent": "{{ ('a\n'*60000)|indent('x'*60000) }}",
    "integer": "{% set ns = namespace(x=9**1000) %}{% for i in range(40) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x > 1 }}",
    "join": "{{ (['x'*1000]*60000)|join('y'*1000) }}",
    "join method": "{{ ('y'*10000).join(['x']*60000) }}",
    "join of fields": "{{ ([{'a':'x'*60000}]*60000)|join('y', attribute='a') }}",
    "JSON": "{{ ([1]*60000)|tojson(indent=60000)|length }}",
    "justified": "{{ 'a'.ljust(1000000000) }}",
    "list doubled by +": _doubled("ns.x + ns.x", "ns.x|length"),
    "list doubled by a list": _doubled("[ns.x, ns.x]", "ns.x|tojson|length"),
    "list doubled by *": _doubled("[ns.x] * 2", "('%s' % ns.x)|length"),
    "map": "{{ (['a']*60000)|map('center', 60000)|list|length }}",
    "joined many": "{% set x = 'a'*60000000 %}{{ " + "~".join("x" * 60) + " }}",
    "join of a generator": "{{ ('y'*1000000).join(range(100000)|map('string'))|length }}",
    "join of characters": "{{ ('y'*60000).join('x'*60000)|length }}",
    "loop without a body": "{% set x = range(100000)|list %}{% for i in range(99999) %}"
    "{% for y in x if y == -1 %}{% endfor %}{% endfor %}",
    "printed in a separate block": "{% set y = self.a()|length %}"
    "{% block a %}{% set x = 'a' * 60000000 %}"
    "{% for i in range(1000) %}{{ x }}{% endfor %}{% endblock %}",
    "printed in a loop of itself": "{% set x = 'a' * 60000000 %}{% set y %}"
    "{% for i in range(1000) recursive %}{{ x }}{% endfor %}{% endset %}{{ y|length }}",
    "printed by a macro": "{% set x = 'a' * 60000000 %}{% macro f() %}{% for i in range(1000) %}"
    "{{ x }}{% endfor %}{% endmacro %}{{ f()|length }}",
    "operator %": "{{ '%1000000000d' % 1 }}",
    "operator %*": "{{ '%*d' % (1000000000, 1) }}",
    "operator % with names": "{{ ('%(a)s' * 60000) % {'a': 'x' * 60000} }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "printed in a block": "{% set x = 'a' * 60000000 %}{% set y %}{% for i in range(1000) %}"
    "{{ x }}{% endfor %}{% endset %}{{ y|length }}",
    "replace": "{{ ('a'*60000)|replace('a', 'x'*60000) }}",
    "replace method": "{{ ('a'*60000).replace('a', 'x'*60000) }}",
    "rounded": "{{ 1.5|round(100000000, 'ceil') }}",
    "slice": "{{ [text]|slice(10000000, 'x')|list|length }}",
    "split": "{{ ('x '*30000000).split()|length }}",
    "sum of lists": "{{ ([[1]*1000]*2000)|sum(start=[])|length }}",
    "tabs": "{{ ('\t'*60000).expandtabs(60000) }}",
    "times": "{{ 'x' * 1000000000 }}",
    "words": "{{ ('x '*30000000)|wordcount }}",
    "wordwrap": "{{ ('a '*30000)|wordwrap(1, true, 'x'*60000) }}",
}
_FAILING: Final = {
    "a recursive loop in a row": "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}",
    "a block in itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "a loop in itself": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "a macro in itself": "{% macro f(n) %}{{ f(n+1) }}{% endmacro %}{{ f(0) }}",
}


def _templates() -> dict[str, tuple[Callable[[], Case], str]]:
    """Return tables of one row with a hostile template, and the expected end of each."""
    found: dict[str, tuple[Callable[[], Case], str]] = {}
    for kind, templates, words in (
        ("deep", _DEEP, "is nested too deeply"),
        ("endless", _ENDLESS, "it (makes a|takes more than 250,000)"),
        ("failing", _FAILING, "is nested too deeply"),
    ):
        for name, template in templates.items():
            found[f"{kind}: {name}"] = (
                partial(lambda text: (_TEXT, _prompt(text)), template),
                words,
            )
    long_int = "{{ " + "9" * 5000 + " }}"
    found["a number of 5,000 digits"] = (lambda: (_TEXT, _prompt(long_int)), "cannot be compiled: ")
    lists = "{% set ns = namespace(x=[1]) %}{% for i in range(1500) %}{% set ns.x = [ns.x] %}"
    lists += "{% endfor %}{{ ns.x|tojson }}"
    either = "^rows$|is nested too deeply"  # Python 3.13 nests deeper
    found["JSON of 1,500 lists"] = (lambda: (_TEXT, _prompt(lists)), either)
    twice = "{{ dict(a=1, a=2) }}"
    found["a name twice"] = (lambda: (_TEXT, _prompt(twice)), "keyword argument repeated")
    return found


def _recipe(more: bytes) -> Callable[[], Case]:
    return lambda: (_TEXT, _PROMPT + b"[params]\n" + more)


_RECIPES: Final[Mapping[str, tuple[Callable[[], Case], str]]] = {
    "900 lists": (_recipe(b"x = " + b"[" * 900 + b"]" * 900), "nested too deeply"),
    "70 lists": (_recipe(b"x = " + b"[" * 70 + b"]" * 70), "more than 64 levels"),
    "600 tables": (_recipe(b"x = " + b"{a=" * 600 + b"1" + b"}" * 600), "nested too deeply"),
    "a key of 20,000 parts": (_recipe(b".".join([b"a"] * 20_000) + b" = 1"), "more than 64 levels"),
    "a quoted key of parts": (
        _recipe(b"s = '''a''''\n" + b'"b"."c".' * 40 + b"a = 1"),
        "more than 64 levels",
    ),
    "a number of 5,000 digits": (_recipe(b"x = " + b"9" * 5_000), "4300 digits"),
    "a hexadecimal number of 16,000 digits": (
        _recipe(b"x = 0x" + b"f" * 16_000),
        "a number of more than 64 bits",
    ),
    "not a number": (_recipe(b"x = nan"), "nan, which JSON does not support"),
    "a date": (_recipe(b"x = 1979-05-27"), "it contains a date or time"),
    "not UTF-8": (lambda: (_TEXT, b"prompt = '\xff'"), "it is not UTF-8"),
    "70 kB": (_recipe(b"x = '" + b"x" * 70_000 + b"'"), "longer than 65,536 bytes"),
    "900 templates": (
        lambda: (_TEXT, b"messages = [" + b"'{{ text + text }}'," * 900 + b"]"),
        "rows",
    ),
}
_TABLES: Final[Mapping[str, tuple[Callable[[], Case], str]]] = {
    "a zone that does not exist": (
        lambda: (_arrow({"text": pa.array([1], pa.timestamp("s", "Mars/Olympus"))}), _PROMPT),
        "does not know its time zone",
    ),
    "a kept zone that does not exist": (
        lambda: (
            _arrow({"text": ["a"], "t": pa.array([1], pa.timestamp("s", "Mars/Olympus"))}),
            _PROMPT + b"output = 'csv'",
        ),
        "does not know its time zone",
    ),
    "a long page": (
        lambda: (
            _parquet({"text": ["x" * 70_000_000]}, use_dictionary=False, write_statistics=False),
            _PROMPT,
        ),
        "has a page of 70,000",
    ),
    "many long pages": (
        lambda: (
            _parquet(
                {f"c{i}": ["x" * 30_000_000] for i in range(6)},
                use_dictionary=False,
                write_statistics=False,
            ),
            _prompt("{{ c0 }}{{ c1 }}{{ c2 }}{{ c3 }}{{ c4 }}{{ c5 }}"),
        ),
        "pages of 180,000,",
    ),
    "a list of millions": (
        lambda: (_parquet({"text": _one_list(_zeros(5 * _MIB))}), _prompt("{{ text|length }}")),
        "5,242,880 values in 1 rows",
    ),
    "a list of one text": (
        lambda: (
            _parquet({"text": _one_list(_dictionary(100_000, "x" * 1_000_000))}),
            _prompt("{{ text|length }}"),
        ),
        "needs more than 134,217,728 bytes",
    ),
    "millions of rows in Parquet": (
        lambda: (_parquet({"text": _dictionary(20 * _MIB, "a")}, row_group_size=2**26), _PROMPT),
        "rows",
    ),
    "deep structs in Parquet": (
        lambda: (_parquet({"text": pa.nulls(1, _nested(pa.int8(), 60))}), _prompt("{{ text }}")),
        "column `text` is null",
    ),
    "a name that is not UTF-8": (
        lambda: (
            _parquet({"text": ["a"], "zzzz": ["b"]}, store_schema=False).replace(
                b"zzzz", b"\xff\xfe\xff\xfe"
            ),
            _PROMPT,
        ),
        "is damaged or truncated: it is not UTF-8",
    ),
    "an Arrow name that is not UTF-8": (
        lambda: (
            _arrow({"text": ["a"], "zzzz": ["b"]}).replace(b"zzzz", b"\xff\xfe\xff\xfe"),
            _PROMPT,
        ),
        "is damaged or truncated: it is not UTF-8",
    ),
    "a footer with false sizes": (
        lambda: (_parquet({"text": ["a"]})[:-8] + b"\xff\xff\xff\x7fPAR1", _PROMPT),
        "is damaged or truncated",
    ),
    "a cut Parquet": (
        lambda: (_parquet({"text": ["a"]})[:-20], _PROMPT),
        "is damaged or truncated",
    ),
    "an encrypted Parquet": (lambda: (b"PARE" + bytes(99), _PROMPT), "an encrypted Parquet table"),
    "a packed Arrow text": (
        lambda: (_arrow({"text": ["x" * 140_000_000]}, compression="zstd"), _PROMPT),
        "needs more than 134,217,728 bytes",
    ),
    "a packed Arrow batch of gigabytes": (
        lambda: (
            _grown(_arrow({"text": ["x" * 9_000_000]}, compression="zstd"), 9_000_000),
            _PROMPT,
        ),
        "decompresses to 2,",
    ),
    "a packed Arrow stream of gigabytes": (
        lambda: (
            _grown(
                _arrow({"text": ["x" * 9_000_000]}, compression="zstd", is_stream=True), 9_000_000
            ),
            _PROMPT,
        ),
        "decompresses to 2,",
    ),
    "a text in every row": (
        lambda: (
            _arrow({"text": _dictionary(100_000, "x" * 1_000_000)}, compression="zstd"),
            _PROMPT,
        ),
        "rows",
    ),
    "a view in every row": (
        lambda: (_arrow({"text": _views(2_000, 1_000_000)}, compression="zstd"), _PROMPT),
        "rows",
    ),
    "a run of a text": (
        lambda: (
            _arrow(
                {
                    "text": pa.RunEndEncodedArray.from_arrays(
                        pa.array([2**20], pa.int32()), pa.array(["x" * 1_000_000])
                    )
                },
                compression="zstd",
            ),
            _PROMPT,
        ),
        "rows",
    ),
    "a value of a union in every row": (
        lambda: (
            _arrow(
                {
                    "text": pa.UnionArray.from_dense(
                        _zeros(5_000),
                        pa.array([0] * 5_000, pa.int32()),
                        [pa.array(["x" * 1_000_000])],
                    )
                },
                compression="zstd",
            ),
            _PROMPT,
        ),
        "rows",
    ),
    "bytes of a fixed length in every row": (
        lambda: (
            _arrow(
                {
                    "text": pa.DictionaryArray.from_arrays(
                        _zeros(5_000), pa.array([b"x" * 1_000_000], pa.binary(1_000_000))
                    )
                },
                compression="zstd",
            ),
            _PROMPT,
        ),
        "column `text` is bytes",
    ),
    "long values of a fixed length in Parquet": (
        lambda: (
            _parquet({"text": pa.array([b"x" * 50_000_000] * 3, pa.binary(50_000_000))}),
            _PROMPT,
        ),
        "column `text` is bytes",
    ),
    "a list in every row": (
        lambda: (
            _arrow({"text": _list_views(10_000, 1_000_000)}, compression="zstd"),
            _prompt("{{ text|length }}"),
        ),
        "rows",
    ),
    "a list of 2^31 nulls": (
        lambda: (
            _arrow({"text": _one_list(pa.nulls(2**31 - 2))}),
            _prompt("{{ text|length }}"),
        ),
        "needs more than 134,217,728 bytes",
    ),
    "an index outside": (
        lambda: (
            _arrow(
                {
                    "text": pa.DictionaryArray.from_buffers(
                        pa.dictionary(pa.int8(), pa.string()),
                        1,
                        [None, pa.py_buffer(b"\x7f")],
                        pa.array(["a"]),
                    )
                }
            ),
            _PROMPT,
        ),
        "is damaged or truncated, at row 1",
    ),
    "a cut Arrow": (lambda: (_arrow({"text": ["a"]})[:200], _PROMPT), "is damaged or truncated"),
    "a stream of 2^31 bytes": (
        lambda: (b"\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(100), _PROMPT),
        "is damaged or truncated",
    ),
    "100,000 columns": (
        lambda: (_csv([f"c{i}" for i in range(100_000)]), _prompt("{{ row|tojson|length }}")),
        "rows",
    ),
    "10,000 columns and a name": (
        lambda: (_csv([f"c{i}" for i in range(10_000)]), _prompt("{{ c1x }}")),
        "names `c1x`, which is not a column",
    ),
    "100,000 equal names": (lambda: (_csv(["a"] * 100_000), _PROMPT), "more than one column named"),
    "a name of 10 MB": (lambda: (_csv(["x" * 10_000_000, "a"]), _PROMPT), "names `text`, which is"),
    "a record of 40 MB": (
        lambda: (gzip.compress(b'text,b\n"\n' + (b'","' + b"x" * 999 + b"\n") * 40_000), _PROMPT),
        "is longer than 37,748,736 bytes",
    ),
    "a gzip of 90 MB": (
        lambda: (gzip.compress(b"text\n" + b"x" * 90_000_000), _PROMPT),
        "expands to more than 400 times",
    ),
    "records of 3 MB": (
        lambda: (gzip.compress((b"x" * 3_000_000 + b"\n") * 33), _prompt("hi")),
        "rows",
    ),
    "JSON in 100,000 lists": (
        lambda: (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", _PROMPT),
        "Line 1 of the table is not valid JSON",
    ),
    "JSON in 150 lists": (
        lambda: (b'{"text": ' + b"[" * 150 + b"]" * 150 + b"}\n", _prompt("{{ text|tojson }}")),
        "rows",
    ),
    "JSON with 21,000 keys": (
        lambda: (b"".join(_keys(i) for i in range(21)), _PROMPT),
        "more than 10,000 different keys",
    ),
    "JSON with half a character": (
        lambda: (b'{"text": "a", "\\ud800": 1}\n', _PROMPT),
        "is not valid JSON",
    ),
}
CASES: Final = {
    **{f"recipe: {name}": case for name, case in _RECIPES.items()},
    **{f"table: {name}": case for name, case in _TABLES.items()},
    **{f"template: {name}": case for name, case in _templates().items()},
}


def _csv(names: list[str]) -> bytes:
    return (",".join(names) + "\n" + "a" + "," * (len(names) - 1) + "\n").encode()


def _keys(number: int) -> bytes:
    return json.dumps({"text": "a"} | {f"c{number} {i}": 1 for i in range(1_000)}).encode() + b"\n"


def outcome_of(data: bytes, recipe_file: bytes) -> str:
    """Return how intake handles a table: `rows`, or the error of the first row or of the table."""
    from tidemill.batch.file.lines import ROW_ERROR, FormatError
    from tidemill.batch.table.drop_recipe import recipe_of_file
    from tidemill.batch.table.errors import RecipeError, TableError
    from tidemill.batch.table.reader import open_table, read_rows, rendered
    from tidemill.batch.table.recipe import parse_recipe
    from tidemill.batch.table.table_check import checked_template

    try:
        recipe = parse_recipe(recipe_of_file(recipe_file))
        table = open_table(io.BytesIO(data))
        form = recipe.output or table.format
        template = checked_template(recipe, table.schema, form, table.batches)
        number = 0
        for _, lines in rendered(template, read_rows(table, template.columns)):
            for line in lines:
                number += 1
                if ROW_ERROR.encode() in line[:200]:
                    return f"row: {json.loads(line)[ROW_ERROR]['message']}"
                if number == _MAX_ROWS:
                    return "rows"
    except (RecipeError, TableError, FormatError) as exc:
        return f"refused: {exc}"
    return "rows"


def _run(name: str) -> None:
    """Build a case in one process, read it in another, and print how that ended."""
    with tempfile.TemporaryFile() as table, tempfile.TemporaryFile() as recipe:
        if not os.fork():
            try:
                for file, data in zip((table, recipe), CASES[name][0](), strict=True):
                    file.write(data)
                    file.flush()
            finally:
                os._exit(0)  # an empty table is refused with another message
        os.wait()
        if not os.fork():
            table.seek(0)
            recipe.seek(0)
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            outcome = outcome_of(table.read(), recipe.read())
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            report = {"name": name, "outcome": outcome, "peak_kib": peak}
            sys.stdout.write(json.dumps(report) + "\n")
            sys.stdout.flush()
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    outcome_of(_TEXT, _prompt("{{ text | upper }}"))  # imports everything before processes fork
    for each in sys.argv[1:] or CASES:
        _run(each)
