"""Triton's interpreter, which runs kernels where there is no GPU, without the work that it repeats."""

from types import SimpleNamespace
from typing import Any


def faster(interpreter: Any) -> dict[str, Any]:
    """Return what replaces functions of the interpreter of Triton 3.7.1, by their names.

    For each function that a kernel calls, its own goes through the whole language to replace what the kernel's launch
    has replaced already; and for each type that is looked up, its own makes a dictionary of all types.
    """
    return {
        "_patch_lang": _once_per_kernel(interpreter),
        "_get_np_dtype": _with_memory(interpreter._get_np_dtype),
    }


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

    def of_type(of: Any) -> Any:
        if of.scalar.name not in known:
            known[of.scalar.name] = numpy_type_of(of)
        return known[of.scalar.name]

    return of_type
