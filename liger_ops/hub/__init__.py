"""The kernels hub: `python -m liger_ops.hub build DIR` writes a repository for the `kernels` package.

`build` writes it, `sources` finds the files that it needs. `layers`, `experts`, `recognise` and
`package` are what it contains beside the ops.
"""
