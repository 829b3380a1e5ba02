"""Experts of mixture models, their LoRA and the losses of their routers."""
