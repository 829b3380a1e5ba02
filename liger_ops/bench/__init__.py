"""`python -m liger_ops.bench`: compare every op with its peers on this machine's GPU or NPU.

`workloads` defines the ops, inputs and shapes, and `providers` the implementations that are
compared. `measure` checks and measures them with the timers of `timing`, `judge` finds the rows in
which another provider is faster, `show` prints and plots the results, and `records` reads and
writes the file of a run.
"""
