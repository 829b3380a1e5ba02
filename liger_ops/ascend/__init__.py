"""The NPU's packages on a machine: `python -m liger_ops --npu`, and errors with their cures."""
