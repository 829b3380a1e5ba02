"""Argument checks and output allocation.

A fake takes a call, the op's arguments as a named tuple, checks the arguments and allocates the
outputs. PyTorch traces with it, and it runs before a device's kernel. Most fakes are compiled from
the op's axes line; the families' modules add checks and sizes that a line cannot express.
"""

from .. import library
from . import lines

library.import_modules(__name__, __path__)
lines.register()
