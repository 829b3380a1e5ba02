"""Argument checks and output allocation.

A fake takes a call, the op's arguments as a named tuple, checks the arguments and allocates the
outputs. PyTorch traces with it, and it runs before a device's kernel.
"""

from .. import library

library.import_modules(__name__, __path__)
