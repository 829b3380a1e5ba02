"""Training steps of a whole model, compiled in several ways: `python -m liger_ops.bench step`."""
