"""Triton's interpreter without what it does again and again: the same answers and the same checks.

At each call of a function of the device, of `tl.sum` too, it looks through all of `triton.language` for names to
replace, though whoever launched the kernel has replaced them; for the dtype of each array it makes a table; each type
of a block, the shape of each tensor and the type of each result is worked out anew. Of the names only the list is kept,
never what they stand for: one that has been replaced is no builtin any more.

What it computes and throws away, it does not compute: of every sum and product of integers whether it overflows, six
operations that end in an assertion which is not made unless one debugs.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import triton.language as tl
from triton.language import core
from triton.language.core import block_type, constexpr, dtype, is_builtin, tensor
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def install() -> None:
    """For this process, whose kernels are all interpreted."""
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _numpy_dtypes(interpreter._get_np_dtype)
    block_type.__init__ = _block_types(block_type.__init__)
    dtype.__eq__ = _equal(dtype.__eq__)
    tensor.__init__ = _tensors(tensor.__init__)
    semantic = TritonSemantic
    semantic.computation_type_impl = _computation_types(semantic.computation_type_impl)
    semantic.binary_op_sanitize_overflow_impl = _overflow(semantic.binary_op_sanitize_overflow_impl)


def _patch_once(patch: Any) -> Any:
    """A function of the device that a kernel calls finds the modules as the kernel's launch has left them."""
    patched: set[int] = set()

    def patch_lang(fn: Any) -> Any:
        langs = {id(value) for value in fn.__globals__.values() if value is tl or value is core}
        if langs and langs <= patched:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        patched.update(langs)
        restore = scope.restore

        def restored() -> None:
            patched.clear()
            restore()

        scope.restore = restored
        return scope

    return patch_lang


@functools.cache
def _builtins_of(holder: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(holder) if is_builtin(member)]


def _patch_builtin(holder: Any, *builder_and_scope: Any) -> None:
    for name in _builtins_of(holder):
        if is_builtin(member := getattr(holder, name)):
            interpreter._patch_attr(holder, name, member, *builder_and_scope)


def _numpy_dtypes(find: Any) -> Any:
    known: dict[str, Any] = {}

    def of(dtype: tl.dtype) -> Any:
        if dtype.name not in known:
            known[dtype.name] = find(dtype)
        return known[dtype.name]

    return of


def _block_types(find: Any) -> Any:
    known: dict[Any, dict[str, Any]] = {}

    def init(self: block_type, element_ty: tl.dtype, shape: Any) -> None:
        sizes = tuple([s.value if type(s) is constexpr else s for s in shape])
        key = (element_ty.name, sizes, *map(type, sizes))
        if key not in known:
            find(self, element_ty, shape)  # raises what there is to raise
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key], element_ty=element_ty)

    return init


def _equal(is_equal: Any) -> Any:
    return lambda self, other: self is other or is_equal(self, other)


def _tensors(make: Any) -> Any:
    known: dict[Any, tuple[Any, Any]] = {}

    def init(self: tensor, handle: Any, type: tl.dtype) -> None:
        sizes = type.shape if type.is_block() else ()
        if sizes not in known:
            make(self, handle, type)
            known[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[sizes]

    return init


def _computation_types(find: Any) -> Any:
    known: dict[Any, tl.dtype] = {}

    def of(self: Any, a_ty: tl.dtype, a_is_scalar: bool, b_ty: tl.dtype, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in known:
            known[key] = find(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return known[key]

    return of


def _overflow(check: Any) -> Any:
    def of(self: Any, lhs: tensor, rhs: tensor, binary_op: Any) -> None:
        a, b = lhs.type.scalar, rhs.type.scalar
        if self.builder.options.debug or a.int_bitwidth < 64 and not (a == b and a.is_int()):
            check(self, lhs, rhs, binary_op)  # which says what is wrong

    return of
