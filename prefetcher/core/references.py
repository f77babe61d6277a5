"""References to named tuples of arrays, for compiled code: what a kernel hands to the parts that it calls.

numba passes a named tuple by value, every array in it as seven numbers: at forty arrays most of what is compiled is the passing. A
reference is one pointer to a copy of the tuple (not of what the arrays hold) on the stack of the kernel that made it. Its fields are
read as the tuple's are, so that parts need not know; it must not outlive that kernel. In Python a reference is the tuple itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from numba.core import cgutils, types
from numba.core.imputils import impl_ret_borrowed
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, lower_builtin, lower_getattr_generic, models, register_model, type_callable

__all__ = ["by_reference"]

Fields = TypeVar("Fields", bound=NamedTuple)


def by_reference(fields: Fields) -> Fields:
    """A reference to `fields`, for as long as the kernel runs that asks for it."""
    return fields


class _Reference(types.Type):
    """The type of a reference to a named tuple of type `of`."""

    def __init__(self, of: Any) -> None:
        self.of = of
        super().__init__(name=f"Reference({of})")

    @property
    def mangling_args(self) -> tuple[str, tuple[()]]:
        # The tuple's own name spells out every field of every record: kilobytes, in the name of each part.
        return f"Reference_{self.of.instance_class.__name__}", ()


@register_model(_Reference)
class _Pointer(models.OpaqueModel):
    """In memory, a pointer."""


@type_callable(by_reference)
def _type_of_by_reference(_context: Any) -> Any:
    def typer(fields: Any) -> Any:
        return _Reference(fields) if isinstance(fields, types.NamedTuple) else None

    return typer


@lower_builtin(by_reference, types.NamedTuple)
def _lower_by_reference(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    return builder.bitcast(cgutils.alloca_once_value(builder, args[0]), cgutils.voidptr_t)


@infer_getattr
class _Fields(AttributeTemplate):
    """What a field of a reference is: what it is of the tuple."""

    key = _Reference

    def generic_resolve(self, reference: Any, name: str) -> Any:  # type: ignore[override]
        return reference.of.types[reference.of.fields.index(name)] if name in reference.of.fields else None


@lower_getattr_generic(_Reference)
def _lower_field(context: Any, builder: Any, reference: Any, pointer: Any, name: str) -> Any:
    number = reference.of.fields.index(name)
    fields = builder.bitcast(pointer, context.get_value_type(reference.of).as_pointer())
    value = builder.load(cgutils.gep_inbounds(builder, fields, 0, number))
    return impl_ret_borrowed(context, builder, reference.of.types[number], value)
