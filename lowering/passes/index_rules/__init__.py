"""The rules of operations. Importing them is what makes them known."""

from . import along, arithmetic, choices, creation, logic, selection, views

__all__ = ["along", "arithmetic", "choices", "creation", "logic", "selection", "views"]
