"""Chat templates: Jinja programs that come with a model, and so from somebody else. They run in Jinja's sandbox, which
keeps them from everything but their arguments, and under limits, which keep them from running or growing without end:
of steps, work and time (template_budget.py), and of the size of what they make. The sandbox alone has none: `{% for %}`
in `{% for %}` runs for years, and "a" * 10**10 takes all memory.

Only filters, tests and methods that are known to be paid for exist (template_tools.py). What Python does without
asking anybody, comparisons, slices, keys, is found in the program before it is compiled, and paid for there, unless one
side is a constant: then it is as short as the template.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from minivllm.errors import BadRequest, ModelError

OF_JINJA = (
    "_loop_vars",
    "_block_vars",
)  # what Jinja's compiler adds to the arguments of a call


def render(template: str, values: Mapping[str, Any], /) -> str:
    """values: its variables, and a budget that several renderings may share (`budget`). Raises BadRequest for messages
    that the template refuses, ModelError for a template that is none."""
    compiled = _compile(template)
    try:
        return compiled.render({**budget(), **values})
    except Exception as e:  # a template is the model's code; whatever it raises is about these messages
        raise BadRequest(f"the chat template refuses these messages: {e}", "messages") from None


def check(template: str) -> None:
    """Raises ModelError for what is no template."""
    _compile(template)


def parse(template: str) -> Any:
    """Its program. Raises jinja2's TemplateSyntaxError, or RecursionError, for what is none."""
    return _environment().parse(template)


@functools.lru_cache(maxsize=16)
def knows_tools(template: str) -> bool:
    from jinja2 import TemplateSyntaxError, nodes

    try:
        return any(name.name == "tools" for name in parse(template).find_all(nodes.Name))
    except (TemplateSyntaxError, RecursionError):  # _compile says so, once it is rendered
        return True


@functools.lru_cache(maxsize=16)
def mentions(template: str) -> frozenset[str]:
    """All attributes, keys and other texts that stand in its program: fields of messages and roles among them."""
    from jinja2 import TemplateSyntaxError, nodes

    try:
        tree = parse(template)
    except (TemplateSyntaxError, RecursionError):
        return frozenset()
    texts = {constant.value for constant in tree.find_all(nodes.Const) if isinstance(constant.value, str)}
    return frozenset(texts | {field.attr for field in tree.find_all(nodes.Getattr)})


@functools.lru_cache(maxsize=16)
def read_variables(template: str) -> frozenset[str]:
    """The names that it does not set itself."""
    from jinja2 import TemplateSyntaxError, meta

    try:
        return frozenset(meta.find_undeclared_variables(parse(template)))
    except (TemplateSyntaxError, RecursionError):
        return frozenset()


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> Any:
    from jinja2 import TemplateSyntaxError

    try:
        return _environment().from_string(_limited(parse(template)))
    except TemplateSyntaxError as e:
        raise ModelError(f"the chat template is not valid Jinja (line {e.lineno}: {e})") from None
    except (SyntaxError, RecursionError, MemoryError) as e:  # of the Python that it becomes
        raise ModelError(f"the chat template nests too deeply: {e}") from None


def budget() -> dict[str, Any]:
    """A variable that no template can name: what a rendering may take."""
    from minivllm.engine.template_budget import Budget
    from minivllm.engine.template_tools import BUDGET

    return {BUDGET: Budget()}


def _limited(tree: Any) -> Any:
    """The program with its loops counted, and paying for what it compares, cuts and puts together."""
    from jinja2 import TemplateSyntaxError, nodes

    def through(name: str, node: Any) -> Any:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def is_constant(node: Any) -> bool:
        return isinstance(node, nodes.Const) or (
            isinstance(node, nodes.Tuple | nodes.List) and all(map(is_constant, node.items))
        )

    for modifier in tree.find_all(nodes.ScopedEvalContextModifier):
        raise TemplateSyntaxError("it may not switch on escaping", modifier.lineno)
    for pair in list(tree.find_all(nodes.Pair)):
        if not is_constant(pair.key):
            pair.key = through("read", pair.key)
    for part in list(tree.find_all(nodes.Getitem)):
        if isinstance(part.arg, nodes.Slice):
            part.node = through("searched", part.node)
        elif not is_constant(part.arg):  # a tuple's hash takes as long as all that it holds
            part.arg = through("read", part.arg)
    for compared in list(tree.find_all(nodes.Compare)):
        _pay_for_comparisons(compared, through, is_constant)
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = through("counted", loop.iter)
    for block in list(tree.find_all(nodes.AssignBlock)):  # {% set x %}...{% endset %}; None: what the block has made
        block.filter = nodes.Filter(block.filter, "made", [], [], None, None, lineno=block.lineno)
    for joined in list(tree.find_all(nodes.Concat)):  # a ~ b
        pieces = nodes.Tuple(joined.nodes, "load", lineno=joined.lineno)
        joined.nodes = [through("concatenated", pieces)]
    return tree


def _pay_for_comparisons(compared: Any, through: Any, is_constant: Any) -> None:
    """a == b takes no longer than going through a; a in b no longer than going through b."""
    left, holder, name = compared.expr, compared, "expr"
    for operand in compared.ops:
        looks, fixed = operand.op in ("in", "notin"), is_constant(operand.expr)
        if not is_constant(left) and (looks or not fixed):
            setattr(holder, name, through("read", left))
        if looks and not fixed:
            operand.expr = through("searched" if is_constant(left) else "read", operand.expr)
        left, holder, name = operand.expr, operand, "expr"


@functools.cache
def _environment() -> Any:
    """With the names and settings that transformers gives to templates."""
    from jinja2 import nodes, pass_context
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.runtime import LoopContext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from minivllm.engine import template_tools as tools
    from minivllm.engine.template_tools import BUDGET

    def concat(pieces: Iterable[str]) -> str:
        """What a block, a macro or the whole has written. Whoever uses it pays."""
        texts, size = [], 0
        for piece in pieces:
            size += len(piece)
            if size > tools.MAX_CHARS:
                tools.fits(size)
            texts.append(piece)
        return "".join(texts)

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("+", "*", "**", "%"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" and not (isinstance(right, int | float) and abs(right) <= 64):
                raise SecurityError("its powers are too high")
            if operator == "%" and isinstance(left, str):
                tools.narrow(context[BUDGET], left, right)
            if operator == "*":
                for item, times in ((left, right), (right, left)):
                    if isinstance(item, str | list | tuple) and isinstance(times, int):
                        tools.not_too_often(times, item)
            made = super().call_binop(context, operator, left, right)
            return (
                made if isinstance(made, str) and len(made) < tools.MAX_SHORT else tools.measured(context[BUDGET], made)
            )

        def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            budget = context[BUDGET]
            of_jinja = {name: kwargs.pop(name) for name in OF_JINJA if name in kwargs}
            instead = tools.pay_for_call(budget, function, args, kwargs)
            if instead is not None:
                return tools.measured(budget, instead())
            if isinstance(function, LoopContext):  # of a loop that is recursive
                args = (budget.counted(args[0]), *args[1:])
            return tools.measured(budget, super().call(context, function, *args, **kwargs, **of_jinja))

    class Generation(Extension):
        """{% generation %} marks what an assistant wrote, for training; here its body is just rendered,
        in a scope of its own."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    @pass_context
    def printed(context: Any, value: Any) -> Any:
        """Before an expression's value is written as text."""
        if not isinstance(value, str):
            context[BUDGET].read(value)
        return value

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.concat, environment.finalize = concat, printed
    environment.filters, environment.tests = tools.filters(), tools.tests()
    del environment.globals["lipsum"]
    environment.globals |= tools.FUNCTIONS
    return environment
