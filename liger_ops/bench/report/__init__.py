"""`python -m liger_ops.bench report`: measure a GPU within an hour, and write one page about it.

`plan` lists the measurements in their order, and stores one record of each. `measured` makes those
of heads, kernels and loss curves, each in a process of its own; training steps are those of
`liger_ops.bench.steps`. `page` writes the page and its plots from the records alone.
"""
