"""Whole training steps, compared and timed, each by a command with `--help`.

python -m liger_ops.bench.steps.model              a model, compiled in several ways
python -m liger_ops.bench.steps.trl                TRL's trainers
python -m liger_ops.bench.steps.experts            the experts of a mixture-of-experts layer
torchrun ... -m liger_ops.bench.steps.vocabulary   losses of a vocabulary sharded over GPUs
torchrun ... -m liger_ops.bench.steps.tensor_parallel   a layer under tensor parallelism
"""
