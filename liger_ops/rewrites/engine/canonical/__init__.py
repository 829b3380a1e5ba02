"""One form for the many spellings of an operation.

`canonical(node)` is a `Call` of a name and arguments, the same for a method, a function and an
operator, for a default that is written or omitted, and for dimensions counted from either end. It
is None for an operation without a spelling; None matches nothing.

A spelling is a Python function with the signature of the operation, so that Python binds the
arguments, or the signature itself, if the form has its arguments (`declared`). A call that cannot
be bound, or whose further arguments change the result, is None. A call of an op of liger_ops has
all arguments of the op's definition.
Importing the modules of this package registers their spellings.
"""

from . import arithmetic, dtypes, functional, losses, views
from .call import (
    COMMUTATIVE,
    IDENTITY,
    Call,
    Known,
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
)

__all__ = [
    "COMMUTATIVE", "IDENTITY", "Call", "Known", "arguments", "arithmetic", "calls", "canonical",
    "dimension", "dtypes", "functional", "is_tensor", "losses", "never_changed", "operation",
    "same", "same_number", "unchanged", "value", "views",
]  # fmt: skip
