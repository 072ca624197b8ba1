"""The filters, tests and methods that a chat template may use: Jinja's, each with what it has to pay beforehand.

What is not in these tables does not exist for a template. A filter's row says how it is paid for:

    FREE    nothing: it looks at one thing, however long that is
    READ    for going through the value, and through its arguments once for each item
    LAZY    for each item, when somebody asks for it: it makes an iterator
    SORTED  as READ, times the logarithm of the number of items

and a function of this file, made for it, where a filter can make more than it is given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, MappingView
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, Undefined, pass_context
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.sandbox import safe_range
from jinja2.tests import TESTS
from jinja2.utils import Cycler, Joiner, Namespace

from minivllm.engine import template_shapes as shapes
from minivllm.engine.template_budget import ITEM, Budget

MAX_CHARS = 16 * 2**20  # of a text, as many as a body has bytes
MAX_ITEMS = 100_000  # of a list
MAX_SORTED = 2**14
MAX_WIDTH = 1000  # of a field that is padded
MAX_SHORT = 256  # characters of what is written again and again
MAX_BITS = 4096  # of a number
SLOW = 64  # how much longer than to copy a text it takes to do something with each of its words
BUDGET = " budget"  # a variable that no template can name
# In a format: a width of four digits, or one that is an argument.
_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)|\{[^{}:]*:[^{}]*(\d{4}|\{)")

FREE = ("abs", "attr", "count", "d", "default", "first", "items", "last", "length")
READ = (
    *("capitalize", "e", "escape", "float", "forceescape", "int", "list", "lower", "max", "min", "reverse", "string"),
    *("trim", "truncate", "unique", "upper"),
)
LAZY = ("map", "reject", "rejectattr", "select", "selectattr")
SORTED = ("dictsort", "groupby", "sort")
FREE_TESTS = (
    *("boolean", "callable", "defined", "divisibleby", "even", "false", "filter", "float", "integer", "iterable"),
    *("mapping", "none", "number", "odd", "sameas", "sequence", "string", "test", "true", "undefined"),
)
READ_TESTS = (
    *("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan"),
    *("lower", "lt", "ne", "upper"),
)
PADS = frozenset(("center", "ljust", "rjust", "zfill"))
TEXT_METHODS = PADS | frozenset((
    *("capitalize", "casefold", "count", "endswith", "find", "format", "format_map", "index", "isalnum", "isalpha"),
    *("isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower"),
    *("lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit"),
    *("rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"),
))  # fmt: skip
METHODS = {dict: frozenset(("copy", "get", "items", "keys", "values")), list: frozenset(("count", "index", "copy"))}
METHODS |= {tuple: METHODS[list], shapes.Parts: METHODS[list], shapes.Object: METHODS[dict]}


def measured(budget: Budget, value: Any) -> Any:
    """A value that has been made. Raises SecurityError for one that is too large."""
    if isinstance(value, str):
        if len(value) > MAX_CHARS:
            raise SecurityError(f"it makes a text of over {MAX_CHARS:,} characters")
        budget.spend(len(value))
    elif isinstance(value, list | tuple | dict):
        if len(value) > MAX_ITEMS:
            raise SecurityError(f"it makes a {type(value).__name__} of over {MAX_ITEMS:,}")
        budget.spend(ITEM * len(value))
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise SecurityError(f"it makes a number of over {MAX_BITS} bits")
    return value


def few(num_items: int) -> None:
    if num_items > MAX_ITEMS:
        raise SecurityError(f"it makes a list of over {MAX_ITEMS:,}")


def fits(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise SecurityError(f"it makes a text of over {MAX_CHARS:,} characters")


def not_too_often(times: int, item: str | list | tuple) -> None:
    if times * len(item) > (MAX_CHARS if isinstance(item, str) else MAX_ITEMS):
        raise SecurityError("it repeats something too often")


def short(*widths: Any) -> None:
    if any(isinstance(width, int) and width > MAX_WIDTH for width in widths):
        raise SecurityError("it pads a text too far")
    if any(isinstance(width, str) and len(width) > MAX_SHORT for width in widths):
        raise SecurityError("it repeats a text that is too long")


def narrow(budget: Budget, form: str, *given: Any) -> None:
    """A text to be filled in, and with what: a field may be named again and again."""
    budget.spend(2 * len(form))
    if _WIDE.search(form):
        raise SecurityError("it formats fields that are too wide")
    budget.read(*given, times=1 + form.count("%") + form.count("{"))


# ------------------------------------------------------------------------------------------------------------ filters


SIZED = str | list | tuple | dict | range | MappingView


def _settled(budget: Budget, value: Any) -> Any:
    """A list of what an iterator brings, which so is paid for."""
    if isinstance(value, Iterator):
        return measured(budget, list(budget.counted(value)))
    return value


def _size(value: Any) -> int:
    return len(value) if isinstance(value, SIZED) else 1


def _read(name: str) -> Callable[..., Any]:
    inner = FILTERS[name]
    takes = getattr(inner, "jinja_pass_arg", None)

    @pass_context
    @wraps(inner)
    def paid(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context[BUDGET]
        value = _settled(budget, value)
        few(_size(value) if name in ("list", "unique", "reverse") or not isinstance(value, str) else 0)
        budget.read(value, times=2)
        budget.read(*args, *kwargs.values(), times=1 if isinstance(value, str) else _size(value))
        made = measured(budget, inner(*_first(context, takes), value, *args, **kwargs))
        return str(made) if isinstance(made, str) else made  # never markup, whose methods are others

    return paid


def _first(context: Any, takes: Any) -> tuple[Any, ...]:
    """What a filter of Jinja's wants before its value."""
    wanted = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
    return () if takes is None else (wanted[takes.name],)


def _sorted(name: str) -> Callable[..., Any]:
    paid = _read(name)

    @pass_context
    def sort(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context[BUDGET]
        value = _settled(budget, value)
        if _size(value) > MAX_SORTED:
            raise SecurityError(f"it sorts over {MAX_SORTED:,} items")
        budget.read(value, times=8 + _size(value).bit_length())
        return paid(context, value, *args, **kwargs)

    return sort


def _lazy(name: str) -> Callable[..., Any]:
    inner = FILTERS[name]

    @pass_context
    def paid(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        each = sum(len(text) for text in given if isinstance(text, str))
        items = value if isinstance(value, Undefined) or not value else context[BUDGET].counted(value, each)
        return inner(context, items, *args, **kwargs)

    return paid


@pass_context
def counted(context: Any, items: Iterable) -> Iterator:
    """Around whatever a loop goes through."""
    return context[BUDGET].counted(items)


@pass_context
def made(context: Any, value: Any) -> Any:
    """Around a block that was rendered."""
    return measured(context[BUDGET], value)


@pass_context
def read(context: Any, value: Any) -> Any:
    """Around what is compared, or is a key."""
    context[BUDGET].read(value)
    return value


@pass_context
def searched(context: Any, value: Any) -> Any:
    """Around what a constant is looked for in, or a part is taken of: its items are not gone into."""
    if isinstance(value, str | list | tuple | MappingView):
        context[BUDGET].spend(len(str(value) if isinstance(value, shapes.Parts) else value))
    return value


@pass_context
def join(context: Any, value: Any, separator: Any = "", attribute: str | int | None = None) -> str:
    return joined(context, value, str(separator), attribute)


def joined(context: Any, items: Iterable, separator: str, attribute: str | int | None = None) -> str:
    budget: Budget = context[BUDGET]
    items = str(items) if isinstance(items, str) else items
    items = list(budget.counted(items)) if not isinstance(items, list | tuple | str) else items
    if attribute is not None:
        budget.read(attribute, times=len(items))
        items = [context.environment.getitem(item, attribute) for item in items]
    budget.read(items)
    fits(len(items) * len(separator))
    texts = [item if isinstance(item, str) else str(item) for item in items]
    fits(len(items) * len(separator) + sum(map(len, texts)))
    return measured(budget, separator.join(texts))


@pass_context
def concatenated(context: Any, pieces: tuple) -> str:
    """a ~ b"""
    return joined(context, pieces, "")


@pass_context
def replace(context: Any, text: Any, old: Any, new: Any, count: int | None = None) -> str:
    context[BUDGET].read(text, old, new)
    return replaced(context[BUDGET], str(text), str(old), str(new), -1 if count is None else count)


def replaced(budget: Budget, text: str, old: str, new: str, count: int = -1) -> str:
    budget.spend(2 * len(text))
    found = text.count(old)
    fits(len(text) + (found if count < 0 else min(found, count)) * len(new))
    return measured(budget, text.replace(old, new, count))


@pass_context
def tojson(
    context: Any,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    budget: Budget = context[BUDGET]
    short(indent, *(separators or ()))
    budget.read(value, times=4)
    if indent:
        budget.indent(value, len(indent) if isinstance(indent, str) else indent)
    value = shapes.as_json(value)
    made = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return measured(budget, made)


@pass_context
def indent(context: Any, text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    budget: Budget = context[BUDGET]
    short(width)
    budget.read(text, times=2)
    text = str(text)
    fits(len(text) + (1 + sum(map(text.count, LINE_ENDS))) * (len(width) if isinstance(width, str) else width))
    return measured(budget, FILTERS["indent"](text, width, first, blank))


@pass_context
def center(context: Any, text: Any, width: int = 80) -> str:
    short(width)
    context[BUDGET].read(text)
    return measured(context[BUDGET], str(text).center(width))


@pass_context
def title(context: Any, text: Any) -> str:
    """Python's regular expressions do it, word by word."""
    context[BUDGET].read(text, times=SLOW)
    fits(SLOW * len(str(text)))
    return measured(context[BUDGET], FILTERS["title"](str(text)))


@pass_context
def format(context: Any, form: Any, *args: Any, **kwargs: Any) -> str:
    context[BUDGET].read(form)
    narrow(context[BUDGET], str(form), *args, *kwargs.values())
    return measured(context[BUDGET], FILTERS["format"](str(form), *args, **kwargs))


@pass_context
def add_up(context: Any, items: Iterable, attribute: str | int | None = None, start: Any = 0) -> Any:
    """Numbers; or lists, to one: Python's own `sum` copies all of them for each."""
    budget: Budget = context[BUDGET]
    items = budget.counted(items, len(str(attribute)))
    if attribute is not None:
        items = (context.environment.getitem(item, attribute) for item in items)
    if not isinstance(start, list):
        return measured(budget, sum(map(_number, items), start))
    total = list(start)
    for item in items:
        few(len(total) + len(item))
        total += measured(budget, item)
    return total


def _number(value: Any) -> int | float:
    if not isinstance(value, int | float):
        raise SecurityError("it adds up what is no number")
    return value


class Safe(str):
    """What `safe` gives: what is added to it is escaped, even where nothing else is, as in Jinja. Of its markup it has
    this alone."""

    __slots__ = ()

    def __add__(self, other: Any) -> Safe:
        return Safe(str(self) + (str(other) if isinstance(other, Safe) else str(FILTERS["escape"](other))))

    def __radd__(self, other: Any) -> Safe:
        return Safe(str(FILTERS["escape"](other)) + str(self))


@pass_context
def rounded(context: Any, value: float, precision: int = 0, method: str = "common") -> float:
    if abs(precision) > MAX_SHORT:
        raise SecurityError("it rounds too far")
    return FILTERS["round"](value, precision, method)


@pass_context
def batch(context: Any, value: Iterable, linecount: int, fill_with: Any = None) -> Iterator:
    few(linecount)
    return FILTERS["batch"](context[BUDGET].counted(value, ITEM), linecount, fill_with)


@pass_context
def slices(context: Any, value: Iterable, number: int, fill_with: Any = None) -> Iterator:
    few(number)
    value = list(context[BUDGET].counted(value, ITEM))
    found = FILTERS["slice"](context.eval_ctx, value, number, fill_with)
    return context[BUDGET].counted(found, ITEM)


def _read_test(name: str) -> Callable[..., Any]:
    inner = TESTS[name]

    @pass_context
    def paid(context: Any, value: Any, *args: Any) -> bool:
        context[BUDGET].read(value, *args)
        return inner(value, *args)

    return paid


def filters() -> dict[str, Callable[..., Any]]:
    own = {"join": join, "replace": replace, "tojson": tojson, "indent": indent, "center": center, "format": format}
    own |= {"title": title}
    own |= {"sum": add_up, "round": rounded, "batch": batch, "slice": slices, "safe": Safe}
    own |= {"counted": counted, "made": made, "read": read, "searched": searched, "concatenated": concatenated}
    own |= {name: FILTERS[name] for name in FREE} | {name: _read(name) for name in READ}
    own["items"] = lambda value: FILTERS["items"](shapes.items_of(value))
    return own | {name: _lazy(name) for name in LAZY} | {name: _sorted(name) for name in SORTED}


def tests() -> dict[str, Callable[..., Any]]:
    own = {"string": shapes.is_string, "mapping": shapes.is_mapping, "none": shapes.is_none}
    return {name: TESTS[name] for name in FREE_TESTS} | {name: _read_test(name) for name in READ_TESTS} | own


# -------------------------------------------------------------------------------------------------------------- calls

LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def raise_exception(message: Any) -> None:
    raise TemplateError(message)


def strftime_now(form: str) -> str:
    short(form)
    return datetime.now().strftime(form)


FUNCTIONS = {"raise_exception": raise_exception, "strftime_now": strftime_now}
CALLED = (Macro, BlockReference, LoopContext, Undefined)  # objects that are called themselves
OF_OBJECTS = (LoopContext, Cycler, Joiner)  # whose methods are
MADE_HERE = (safe_range, dict, Namespace, Cycler, Joiner, *FUNCTIONS.values())


def pay_for_call(budget: Budget, function: Any, args: tuple, kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Raises SecurityError for what a template may not call. What to call in its place; None: itself."""
    budget.step()
    given = [*args, *kwargs.values()]
    if isinstance(function, CALLED):
        return None
    budget.read(*given)
    method = getattr(function, "__wrapped__", function)  # the sandbox wraps `format`
    name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
    if isinstance(owner, str) and name in TEXT_METHODS:
        return pay_for_text(budget, owner, name, args, kwargs)
    if type(owner) in METHODS and name in METHODS[type(owner)]:
        budget.read(*([owner] if isinstance(owner, list | tuple) else [owner.keys()] if name == "copy" else []))
        return None
    if (
        any(function is known for known in MADE_HERE)
        or isinstance(function, OF_OBJECTS)
        or isinstance(owner, OF_OBJECTS)
    ):
        return None
    raise SecurityError(f"{name or type(function).__name__} is nothing that it may call")


def _split(split: Callable[..., list[str]], sep: str | None = None, maxsplit: int = -1) -> list[str]:
    found = split(sep, MAX_ITEMS if maxsplit < 0 else min(maxsplit, MAX_ITEMS))
    few(len(found))
    return found


def pay_for_text(budget: Budget, text: str, name: str, args: tuple, kwargs: dict) -> Callable[[], Any] | None:
    budget.spend(2 * len(text))
    if name in PADS:
        short(*(arg for arg in args[:1]))
    elif name in ("format", "format_map"):
        narrow(budget, text, *args, *kwargs.values())
    elif name in ("split", "rsplit"):
        separator, most = [*args, *(None, -1)[len(args) :]]
        if kwargs or not separator:  # white space: how often it is there is not known before
            given = {"sep": separator, "maxsplit": most} | kwargs
            return lambda: _split(getattr(text, name), **given)
        found = text.count(separator)
        few(found if most < 0 else min(found, most))
    elif name == "splitlines":
        few(sum(map(text.count, LINE_ENDS)))
    elif name == "replace" and len(args) in (2, 3):
        return lambda: replaced(budget, text, *args)
    elif name == "join" and len(args) == 1:
        items = args[0]
        return lambda: joined({BUDGET: budget}, _settled(budget, items), text)
    return None
