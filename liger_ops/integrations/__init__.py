"""The ops behind functions of other projects, one file for each project.

No file is imported until the user imports it.
"""
