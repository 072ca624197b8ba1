"""No template runs or grows without end: what it does is paid for before it is done, whatever it is done with.

Nothing here waits for a clock: the one that templates are measured by is a test's own, and what is not stopped by a
limit of work runs far longer than a test may.
"""

from __future__ import annotations

import jinja2
import pytest

from minivllm.engine import chat_template, template_budget, template_tools
from minivllm.engine.chat_template import render
from minivllm.engine.template_budget import Budget
from minivllm.errors import BadRequest, ModelError

BIG = "{% set big = 'x' * 16000000 %}"
OFTEN = "{% for i in range(99999) %}"
# A list of twice the list before it, sixty times over: small, and 2 ** 60 items to go through.
TWICE = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
PAIRS = "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"

TOO_LARGE = [
    "{{ [1] | slice(60000000) | list }}", "{{ [1] | batch(60000000, 0) | list }}",
    "{{ 1.5 | round(100000000, 'ceil') }}",
    "{{ (['x' * 1000000] * 90000) | tojson }}", "{{ (['x' * 1000000] * 90000) | string }}",
    "{{ ['x' * 1000000] * 90000 }}", "{{ (['x' * 1000000] * 90000) | join }}",
    BIG + "{% set b = 'x' * 15999999 ~ 'x' %}" + OFTEN + "{% if big == b %}{% endif %}{% endfor %}",
    BIG + OFTEN + "{% if 'y' in big %}{% endif %}{% endfor %}",
    BIG + OFTEN + "{% set y = big[1:] %}{% endfor %}", BIG + OFTEN + "{% set y = big | upper %}{% endfor %}",
    BIG + OFTEN + "{% set y = big.strip('x') %}{% endfor %}", BIG + OFTEN + "{{ big }}{% endfor %}",
    BIG + OFTEN + "{% set y = big | tojson %}{% endfor %}", BIG + OFTEN + "{% set y = big + 'x' %}{% endfor %}",
    BIG + OFTEN + "{% if big is eq 'x' %}{% endif %}{% endfor %}",
    "{% set items = range(9999) | list %}" + OFTEN + "{% set y = items | sort %}{% endfor %}",
    "{{ range(99999) | list | sort }}", BIG + "{{ big | list }}", BIG + "{{ big.split('x') }}",
    "{{ ('x ' * 8000000).split() }}", "{{ ('\n' * 16000000).splitlines() }}", "{{ ('\n' * 16000000) | indent(1000) }}",
    BIG + "{{ '{0}{0}{0}'.format(big) }}", BIG + "{{ '%(a)s%(a)s' % {'a': big} }}", BIG + "{{ big | title }}",
    BIG + "{{ ([1] * 1000) | tojson(separators=[big, big]) }}",
    BIG + "{% macro m() %}{{ big }}{% endmacro %}" + OFTEN + "{% set y = m() %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}" + OFTEN + "{% set ns.l = ns.l + ['x' * 1000000 ~ i] %}{% endfor %}",
    "{{ ([[1] * 1000] * 1000) | sum(start=[]) }}", "{{ strftime_now('%Y' * 1000000) }}",
    "{{ range(99999) | map('string') | map('upper') | map('lower') | list }}", "{{ 9 ** 60 ** 60 }}",
    *(TWICE + use for use in (
        "{{ ns.x }}", "{{ ns }}", "{{ ns.x | tojson }}", "{{ ns.x == [ns.x, ns.x] }}", "{{ [ns] | join }}",
        "{{ '%s' % ns.x }}", "{{ '{}'.format(ns.x) }}", "{{ ns.x ~ 'a' }}", "{{ ns.x in [ns.x, 1] }}",
        "{{ [ns.x, [ns.x]] | max }}", "{{ ns.x | trim }}", "{{ [ns.x].index([ns.x, 1]) }}",
        "{{ raise_exception(ns.x) }}",
        "{{ [ns.x] | select('eq', [ns.x, ns.x]) | list }}")),
    *(PAIRS + use for use in (
        "{{ {}[ns.x] }}", "{{ {ns.x: 1} }}", "{{ ns.x in {} }}", "{{ {}.get(ns.x) }}", "{{ dict([(ns.x, 1)]) }}",
        "{{ [ns.x] | unique | list }}", "{% for i in [1, 2] %}{{ loop.changed(ns.x) }}{% endfor %}")),
]  # fmt: skip


@pytest.fixture
def little(monkeypatch):
    """Limits that take as little time as a test has."""
    monkeypatch.setattr(template_budget, "MAX_WORK", 2**26)
    monkeypatch.setattr(template_budget, "MAX_STEPS", 30_000)


@pytest.mark.parametrize("template", TOO_LARGE)
def test_whatever_a_template_does_it_pays_for(template, little):
    with pytest.raises(BadRequest, match="it (reads or makes|makes|takes|sorts|rounds|repeats|formats)|powers"):
        render(template, {})


@pytest.mark.parametrize(
    "call", ["'a'.expandtabs(9)", "'a'.encode()", "{}.fromkeys(range(9))", "range(9).count(1)",
             "(1).to_bytes(9, 'big')", "'a'.__class__()", "messages()", "[].append(1)", "'a'.maketrans({})"]
)  # fmt: skip
def test_only_methods_that_are_known_are_called(call):
    with pytest.raises(BadRequest, match="nothing that it may call|unsafe|undefined|not safely"):
        render("{{ " + call + " }}", {"messages": []})


@pytest.mark.parametrize("use", ["x | pprint", "x | urlize", "x | wordcount", "x | xmlattr", "x is in_order"])
def test_only_filters_and_tests_that_are_known_exist(use):
    with pytest.raises(ModelError, match="No (filter|test) named"):
        render("{{ " + use + " }}", {})


def test_a_rendering_is_over_when_its_time_is_whatever_its_rounds_hold(monkeypatch):
    seconds = iter(range(10**9))
    monkeypatch.setattr(chat_template, "budget", lambda: {template_tools.BUDGET: Budget(lambda: next(seconds))})
    assert render("{% for i in range(9) %}{{ i }}{% endfor %}", {}) == "012345678"
    with pytest.raises(BadRequest, match="over 10 s"):
        render("{% for i in range(99) %}{{ i }}{% endfor %}", {})


USES = """{{ ['b', 'a'] | sort | join(',') }} {{ [1, 2, 3] | sum }} {{ [[1], [2]] | sum(start=[]) }} {{ 'ab' | list }}
{{ {'b': 1, 'a': 2} | dictsort }} {{ [{'a': 1}, {'a': 2}] | map(attribute='a') | list }} {{ 1.25 | round(1) }}
{{ [1, 2, 3] | select('odd') | list }} {{ [{'r': 'u'}, {'r': 'v'}] | selectattr('r', 'equalto', 'u') | list }}
{{ [1, 2, 3] | batch(2, 0) | list }} {{ [1, 2, 3] | slice(2) | list }} {{ [3, 1] | max }} {{ ' x ' | trim }}
{{ 'a b' | title }} {{ 'x' | center(5) }} {{ 'a,b,c'.split(',', 1) }} {{ ' a  b '.split() }} {{ '5' | int + 1 }}
{{ messages[1:] | length }} {{ messages[::-1][0] }} {{ 'a' in 'abc' }} {{ 1 < 2 < 3 }} {{ 3 not in [1, 2] }}
{% for g in [{'k': 1}, {'k': 1}] | groupby('k') %}{{ g.grouper }}{{ g.list }}{% endfor %} {{ x | default('d') }}
{% for i in [[1, [2]], [3]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %} {{ [1, 1] | unique | list }}
{% macro m(a, b='z') %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ m('y') }}{% call m(1) %}!{% endcall %}
{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }} {{ 'é' | upper }}
{% for i in 'abc' %}{{ loop.cycle('x', 'y') }}{{ loop.changed(i) }}{% endfor %} {{ {'a': {'b': 1}}['a']['b'] }}
{{ 'a<b' | e }} {{ 'x' | indent(2, true) }} {{ 'a' ~ 1 ~ none }} {{ 'abcdef' | truncate(5, true, '') }} {{ 7 // 2 }}
{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }} {% set j = joiner(';') %}{{ j() }}{{ j() }} {{ (1, 2) }}
{{ 'aXa'.replace('X', '-') }} {{ 'a\\nb'.splitlines() }} {{ {'a': 1}.items() | list }} {{ {'a': 1}.get('a') }}"""


def test_what_templates_do_is_as_in_jinja():
    expected = jinja2.Template(USES, trim_blocks=True, lstrip_blocks=True).render(messages=["a", "b"])
    assert render(USES, {"messages": ["a", "b"]}) == expected
