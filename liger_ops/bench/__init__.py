"""`python -m liger_ops.bench`: every op beside its peers, on this machine's GPU or NPU.

`workloads` says what is run and `providers` by whom. `measure` checks and measures it with the
clocks of `timing`, `judge` says where another provider is faster, and `show` prints and draws what
was found; `records` is its file.
"""
