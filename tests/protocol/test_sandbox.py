"""Templates' access to Jinja, and the bound on their rendering."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.engine.scripted_model import TEMPLATE, pretrained_tokenizer
from tidemill.protocol import sandbox
from tidemill.protocol.sandbox import Sandbox, TemplateEndless, strftime_at

LOOP = "{% for i in range(99999) %}"
DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(99) %}HERE{% endfor %}{{ ns.x }}"


def rendered(source: str, **variables: Any) -> str:
    """Return the result of a template with variables."""
    return Sandbox().compile_template(source)(**variables)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(f"{LOOP}{LOOP}{LOOP}x" + "{% endfor %}" * 3, id="loops in loops"),
        pytest.param(f"{LOOP}{LOOP}" + "{% endfor %}" * 2, id="loops that print nothing"),
        pytest.param(
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
            "{{ f(60) }}",
            id="a macro that calls itself twice",
        ),
        pytest.param(
            "{% for x in [[], []] recursive %}{% if loop.depth < 60 %}{{ loop([[], []]) }}"
            "{% endif %}{% endfor %}",
            id="a loop that calls itself twice",
        ),
        pytest.param("{{ 'x' * 10 ** 11 }}", id="a text times a number"),
        pytest.param("{{ 10 ** 11 * [1] }}", id="a number times a list"),
        pytest.param("{{ 9 ** 99999999 }}", id="a number of no end"),
        pytest.param("{{ 'a' | center(10 ** 10) }}", id="a filter's size"),
        pytest.param("{{ [1] | slice(10 ** 10) | list }}", id="slices of nothing"),
        pytest.param("{{ 'a'.zfill(10 ** 10) }}", id="a method's size"),
        pytest.param("{{ [1] | tojson(indent=10 ** 9) }}", id="a named size"),
        pytest.param(
            f"{{% set x = 'a' * 10 ** 6 %}}{LOOP}{{{{ x.count('b') }}}}{{% endfor %}}",
            id="a long text looked through in a loop",
        ),
        pytest.param(DOUBLED.replace("HERE", "{% set ns.x = ns.x + ns.x %}"), id="doubled by +"),
        pytest.param(DOUBLED.replace("HERE", "{% set ns.x = ns.x ~ ns.x %}"), id="doubled by ~"),
        pytest.param(
            DOUBLED.replace("HERE", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
            id="doubled by a block",
        ),
        pytest.param(
            DOUBLED.replace("HERE", "{% set ns.x = [ns.x, ns.x] | join %}"), id="doubled by join"
        ),
        pytest.param(
            DOUBLED.replace("HERE", "{% set ns.x = '%s%s' % (ns.x, ns.x) %}"), id="doubled by %"
        ),
        pytest.param(
            DOUBLED.replace("HERE", "{% set ns.x = ns.x.replace('b', ns.x) %}"),
            id="doubled by a method",
        ),
    ],
)
def test_no_template_runs_without_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loop iterations, calls and the length of texts are counted."""
    monkeypatch.setattr(sandbox, "MAX_STEPS", 5_000)
    monkeypatch.setattr(sandbox, "MAX_TEXT_CHARS", 2**20)
    with pytest.raises(TemplateEndless):
        rendered(source)


def test_the_output_of_a_template_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is printed again and again is stopped as soon as it is too long."""
    monkeypatch.setattr(sandbox, "MAX_TEXT_CHARS", 1_000)
    with pytest.raises(TemplateEndless, match="1,000 characters"):
        rendered("{% for i in range(99) %}{{ x }}{% endfor %}", x="x" * 20)


def test_a_date_is_limited_like_any_text() -> None:
    """A date format is measured before it is used."""
    assert rendered("{{ now('%Y') }}", now=strftime_at(0)) == "1970"
    with pytest.raises(TemplateEndless):
        rendered("{{ now('%c' * 300000) }}", now=strftime_at(0))


def test_each_rendering_has_all_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one line do not count for the next."""
    monkeypatch.setattr(sandbox, "MAX_STEPS", 60)
    render = Sandbox().compile_template("{% for i in range(50) %}x{% endfor %}")
    assert [render() for _ in range(3)] == ["x" * 50] * 3


def test_a_million_characters_are_allowed() -> None:
    """The longest contexts are far below the limits."""
    text = "word " * 200_000
    source = "{% for m in messages %}{{ '<' ~ m.content + '>' }}{% endfor %}"
    assert len(rendered(source, messages=[{"content": text}] * 4)) == 4 * (len(text) + 2)


@pytest.mark.parametrize(
    "source",
    [
        TEMPLATE,
        (
            "{% for m in messages %}{{ m.role }}{% if not loop.last %},{% endif %}{{ loop.length }}"
            "{{ loop.revindex }}{{ loop.previtem is defined }}{{ loop.nextitem is defined }}"
            "{% else %}none{% endfor %}"
        ),
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}{% endfor %}",
        "{% set x | upper %} a {{ messages[0].role }} {% endset %}{{ x | trim }}",
        (
            "{% set x %}{% set y %}b{% endset %}{{ y }}{% endset %}{{ x }}{% filter upper %}"
            "{% set z %}c{% endset %}{{ z }}{% endfilter %}"
        ),
        (
            "{% for m in messages %}\n    {% if loop.first %}{% continue %}{% endif %}\n"
            "{{ m.content }}"
            "\n{% break %}{% endfor %}\n"
        ),
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ '<é>' | tojson }}",
        "{{ dict(a=1).items() | list }}{{ bos_token }}{{ tools }}{{ documents }}",
        (
            "{% macro f(x, y=2) %}{{ x }}{{ y }}{{ caller() }}{% endmacro %}"
            "{% call f(1) %}c{% endcall %}"
        ),
        "{{ messages | map(attribute='role') | join('-') }}{{ '%s %d' % ('a', 3) }}{{ 2 ** 10 }}",
        (
            "{% set ns = namespace(found=false) %}{% for m in messages[::-1] %}"
            "{% set ns.found = m.role"
            " ~ ns.found %}{% endfor %}{{ ns.found }}{{ messages[0].nothing }}"
        ),
    ],
)
def test_output_equals_transformers(source: str) -> None:
    """The counting does not change a template's output."""
    pretrained: PreTrainedTokenizerBase = pretrained_tokenizer()
    messages = [
        {"role": "system", "content": "Be <kind>."},
        {"role": "user", "content": " Hé\n"},
        {"role": "assistant", "content": "x"},
    ]
    expected = pretrained.apply_chat_template(messages, chat_template=source, tokenize=False)
    got = rendered(
        source,
        **pretrained.special_tokens_map,
        messages=messages,
        tools=None,
        documents=None,
        add_generation_prompt=False,
    )
    assert got == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__ }}{{ ''.__class__.__mro__ }}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ raise_exception('no') }}",
        "{{ dict.__base__.__subclasses__() }}",
    ],
)
def test_a_template_stays_in_its_sandbox(source: str) -> None:
    """It cannot change its variables, and cannot access Python."""
    from jinja2.exceptions import TemplateError

    with pytest.raises(TemplateError):
        rendered(source, messages=[])


def test_each_thread_counts_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rendering in another thread does not change this one's steps."""
    monkeypatch.setattr(sandbox, "MAX_STEPS", 100)
    loop = "{% for i in range(n) %}x{% endfor %}"
    render = Sandbox().compile_template(f"{loop}{{{{ f() }}}}{loop}")
    with ThreadPoolExecutor(1) as other:

        def in_thread(turns: int) -> str:
            """Render in another thread from start to end."""
            return other.submit(render, f=str, n=turns).result()

        assert render(f=lambda: in_thread(45), n=40) == "x" * (80 + 90)
        with pytest.raises(TemplateEndless):
            render(f=lambda: in_thread(1), n=60)


def test_large_numbers_are_printed() -> None:
    """A filter's input is not a size, and gives no way to texts of any length."""
    assert (
        rendered("{{ 1700000000 | string }} {{ [10 ** 10] | first }}") == "1700000000 10000000000"
    )
    assert "lipsum" not in Sandbox().globals
