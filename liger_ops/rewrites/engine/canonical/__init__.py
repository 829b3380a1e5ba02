"""One form for the many spellings of an operation.

`canonical(node)` returns a `Call`: an operation's name and its arguments. The call is the same for
a method, a function and an operator, whether a default is written or omitted, and for dimensions
counted from either end. For an operation without a spelling it is None, which matches nothing.

A spelling says how an operation is brought into this form. It is a Python function with the
signature of the operation, so that Python binds the arguments; or, if the canonical form has the
same arguments, the signature alone (`declared`). The canonical call is None if the arguments cannot
be bound, or if an argument that the canonical form lacks changes the result. The canonical call of
an op of liger_ops has all arguments of the op's definition.
Importing the modules of this package registers their spellings.
"""

from . import arithmetic, dtypes, functional, views
from .call import (
    COMMUTATIVE,
    IDENTITY,
    Call,
    Known,
    OpOverload,
    OpOverloadPacket,
    arguments,
    calls,
    canonical,
    dimension,
    is_tensor,
    never_changed,
    operation,
    same,
    same_number,
    unchanged,
    value,
    written_value,
)

__all__ = [
    "COMMUTATIVE", "IDENTITY", "Call", "Known", "OpOverload", "OpOverloadPacket", "arguments",
    "arithmetic", "calls", "canonical", "dimension", "dtypes", "functional", "is_tensor", "losses",
    "never_changed", "operation", "same", "same_number", "unchanged", "value", "views",
    "written_value",
]  # fmt: skip
