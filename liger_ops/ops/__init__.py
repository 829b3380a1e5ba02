"""The ops: each file holds one op's definition in plain PyTorch, its docstring and its gradient."""
