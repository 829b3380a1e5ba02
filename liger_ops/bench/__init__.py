"""`python -m liger_ops.bench`: compare every op with its peers on this machine's GPU or NPU.

`workloads` defines what is run, and `providers` who can run it. `measure` checks and measures with
the timers of `timing`, `judge` finds the rows in which another provider is faster, `show` prints
and plots the results, and `records` reads and writes their file.
"""
