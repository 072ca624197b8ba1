"""Chat templates: Jinja programs that come with a model, and so from somebody else. They run in Jinja's sandbox, which
keeps them from everything but their arguments, and under limits, which keep them from running or growing without end:

    MAX_STEPS   rounds of loops, and calls, of one rendering
    MAX_CHARS   of any text, MAX_ITEMS of any list, that a template makes

The sandbox alone has neither: `{% for %}` in `{% for %}` runs for years, and "a" * 10**10 takes all memory.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from minivllm.errors import BadRequest, ModelError

MAX_STEPS = 250_000
MAX_CHARS = 64 * 2**20  # above any body that a server takes
MAX_ITEMS = 1_000_000
MAX_WIDTH = 1000  # of a field that is padded
MAX_BITS = 4096  # of a number
_PADS = frozenset(("ljust", "rjust", "center", "zfill", "expandtabs"))
# In a format: a width of four digits, or one that is an argument.
_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)|\{[^{}]*:[^{}]*(\d{4}|\{)")
_BUDGET = " steps left"  # a variable that no template can name


def render(template: str, **values: Any) -> str:
    """Raises BadRequest for messages that the template refuses, ModelError for a template that is none."""
    compiled = _compile(template)
    try:
        return compiled.render(**values, **{_BUDGET: [MAX_STEPS]})
    except Exception as e:  # a template is the model's code; whatever it raises is about these messages
        raise BadRequest(f"the chat template refuses these messages: {e}", "messages") from None


@functools.lru_cache(maxsize=16)
def knows_tools(template: str) -> bool:
    from jinja2 import TemplateSyntaxError, nodes

    try:
        return any(name.name == "tools" for name in _environment().parse(template).find_all(nodes.Name))
    except TemplateSyntaxError:  # _compile says so, once it is rendered
        return True


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> Any:
    from jinja2 import TemplateSyntaxError

    try:
        return _environment().from_string(_limited(_environment().parse(template)))
    except TemplateSyntaxError as e:
        raise ModelError(f"the model's chat template is not valid Jinja (line {e.lineno}: {e})") from None


def _limited(tree: Any) -> Any:
    """The program with its loops counted, and what it puts together from pieces measured."""
    from jinja2 import nodes

    def through(name: str, node: Any, line: int) -> Any:
        return nodes.Filter(node, name, [], [], None, None, lineno=line)

    for loop in list(tree.find_all(nodes.For)):
        loop.iter = through("counted", loop.iter, loop.lineno)
    for block in list(tree.find_all(nodes.AssignBlock)):  # {% set x %}...{% endset %}; None: what the block has made
        block.filter = through("measured", block.filter, block.lineno)
    for joined in list(tree.find_all(nodes.Concat)):  # a ~ b
        pieces = nodes.Tuple(joined.nodes, "load", lineno=joined.lineno)
        joined.nodes = [through("concatenated", pieces, joined.lineno)]
    return tree


@functools.cache
def _environment() -> Any:
    """With the names and settings that transformers gives to templates."""
    from jinja2 import TemplateError, pass_context
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

    def spend(context: Any) -> None:
        budget = context[_BUDGET]
        budget[0] -= 1
        if budget[0] < 0:
            raise SecurityError(f"it takes over {MAX_STEPS:,} steps")

    def measured(value: Any) -> Any:
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise SecurityError(f"it makes a number of over {MAX_BITS} bits")
        most = MAX_CHARS if isinstance(value, str) else MAX_ITEMS
        if isinstance(value, str | list | tuple) and len(value) > most:
            raise SecurityError(f"it makes a {type(value).__name__} of over {most:,}")
        return value

    @pass_context
    def counted(context: Any, items: Iterable) -> Iterator:
        for item in items:
            spend(context)
            yield item

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("+", "*", "**", "%"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" and not (isinstance(right, int | float) and abs(right) <= 64):
                raise SecurityError("its powers are too high")
            if operator == "%" and isinstance(left, str):
                narrow(left)
            if operator == "*":
                for item, times in ((left, right), (right, left)):
                    if isinstance(item, str | list | tuple) and isinstance(times, int):
                        not_too_often(times, item)
            return measured(super().call_binop(context, operator, left, right))

        def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            spend(context)
            method = getattr(function, "__wrapped__", function)  # the sandbox wraps `format`
            name, text = getattr(method, "__name__", ""), getattr(method, "__self__", None)
            if isinstance(text, str):
                if name in _PADS:
                    short(*args, *kwargs.values())
                elif name in ("format", "format_map"):
                    narrow(text)
                elif name == "join":
                    return join(*args, text)
                elif name == "replace":
                    return replace(text, *args)
            return measured(super().call(context, function, *args, **kwargs))

    class Generation(Extension):
        """{% generation %} marks what an assistant wrote, for training; here its body is just rendered."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def narrow(format: Any, *_: Any) -> None:
        if _WIDE.search(str(format)):
            raise SecurityError("it formats fields that are too wide")

    def short(*widths: Any) -> None:
        if any(isinstance(width, int) and width > MAX_WIDTH for width in widths):
            raise SecurityError("it pads a text too far")

    def checked(check: Callable[..., None], make: Callable[..., Any]) -> Callable[..., Any]:
        def make_if_right(*args: Any, **kwargs: Any) -> Any:
            check(*args, *kwargs.values())
            return make(*args, **kwargs)

        return make_if_right

    def not_too_often(times: int, item: Any) -> None:
        if times * len(item) > (MAX_CHARS if isinstance(item, str) else MAX_ITEMS):
            raise SecurityError("it repeats something too often")

    def join(items: Iterable, separator: Any = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            items = (environment.getitem(item, attribute) for item in items)
        texts = [str(item) for item in items]
        not_too_often(len(texts), str(separator))
        if sum(map(len, texts)) > MAX_CHARS:
            raise SecurityError("it makes a text that is too long")
        return str(separator).join(texts)

    def replace(text: Any, old: Any, new: Any, count: int | None = -1) -> str:
        text, old, new = str(text), str(old), str(new)
        not_too_often(text.count(old), new)
        return text.replace(old, new, -1 if count is None else count)

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        short(indent)
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    del environment.globals["lipsum"], environment.filters["wordwrap"]
    filters = environment.filters
    filters |= {"join": join, "replace": replace, "format": checked(narrow, filters["format"])}
    filters |= {name: checked(short, filters[name]) for name in ("center", "indent")}
    filters |= {"counted": counted, "measured": measured, "concatenated": join, "tojson": tojson}
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment
