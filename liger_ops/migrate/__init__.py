"""`python -m liger_ops.migrate PATH...`: list where a project uses Liger-Kernel, and what to write.

`table` has what replaces each name, `places` finds the names in files.
"""
