"""Triton's interpreter, which runs kernels where there is no GPU, without the work that it repeats."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any


def faster(interpreter: Any) -> list[tuple[Any, str, Any]]:
    """Return what replaces parts of the interpreter of Triton 3.7.1: of which object, by which name, by what.

    For each function that a kernel calls, its own goes through the whole language to replace what the kernel's launch
    has replaced already; for each type that is looked up, its own makes a dictionary of all types; for each number it
    works out and prints its shape anew. It looks for integers that overflow too, and drops what it finds unless it
    debugs.
    """
    core, builder = interpreter.tl.core, interpreter.interpreter_builder
    return [
        (interpreter, "_patch_lang", _once_per_kernel(interpreter)),
        (interpreter, "_get_np_dtype", _with_memory(interpreter._get_np_dtype)),
        (core.block_type, "__init__", _block_type(core)),
        (core.tensor, "__init__", _tensor(core)),
        (builder, "options", replace(builder.options, sanitize_overflow=builder.options.debug)),
    ]


def _once_per_kernel(interpreter: Any) -> Any:
    """Return what replaces the whole language, unless it is replaced, and the scope that restores it."""
    replace, language = interpreter._patch_lang, interpreter.tl
    whole = SimpleNamespace(__globals__={"language": language, "core": language.core})

    def replaced(_function: Any) -> Any:
        if any(language.core.is_builtin(module.load) for module in (language, language.core)):
            return replace(whole)
        return interpreter._LangPatchScope()

    return replaced


def _with_memory(numpy_type_of: Any) -> Any:
    """Return `numpy_type_of` with a memory of scalar types, since a block has the NumPy type of its elements."""
    known: dict[str, Any] = {}

    def of_type(triton_type: Any) -> Any:
        if triton_type.scalar.name not in known:
            known[triton_type.scalar.name] = numpy_type_of(triton_type)
        return known[triton_type.scalar.name]

    return of_type


def _block_type(core: Any) -> Any:
    """Return what makes a type of blocks, with a memory of shapes."""
    make = core.block_type.__init__
    known: dict[tuple[int, ...], tuple[Any, int]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(core._unwrap_if_constexpr(size) for size in shape)
        if sizes not in known:
            make(self, element_ty, shape)
            known[sizes] = self.shape, self.numel
        self.element_ty = element_ty
        self.shape, self.numel = known[sizes]
        self.name = f"<{sizes}, {element_ty}>"

    return init


def _tensor(core: Any) -> Any:
    """Return what makes a number or a block, with a memory of shapes as Triton has them."""
    make = core.tensor.__init__
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in known:
            make(self, handle, type)
            known[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[sizes]

    return init
