"""The kernels hub: `python -m liger_ops.hub build DIR` writes a repository for it.

`build` writes it, and `sources` finds the files that it needs. `layers`, `experts`, `recognise` and
`package` are what it contains beside the ops. `local` uses it with the package `kernels`.
"""
