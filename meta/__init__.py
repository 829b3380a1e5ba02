"""Argument checks and output allocation.

A fake is a function of a call, the op's arguments as a named tuple. It is what PyTorch traces with,
and what runs before a device's kernel, to check the arguments and allocate the outputs.
"""

from .. import library

library.import_modules(__name__, __path__)
