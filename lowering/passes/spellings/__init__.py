"""The spellings of operations. Importing them is what makes them known."""

from . import arithmetic, dtypes, functional, losses, views

__all__ = ["arithmetic", "dtypes", "functional", "losses", "views"]
