"""The spellings of operations. Importing them is what makes them known."""

from . import arithmetic, dtypes, functional, views

__all__ = ["arithmetic", "dtypes", "functional", "views"]
