"""LoRA of peft: layers, heads and experts become ops."""
