"""`python -m liger_ops.bench`: every op beside its peers, on this machine's GPU or NPU.

`workloads` says what is run, `providers` by whom, `device`, `calls`, `checking` and `timing` how it
is measured, `measuring` in which order. What comes out are the points of `points`; `records` is
their file, and `table`, `verdicts`, `plotting`, `docs` and `comparing` show them.
"""
