"""What runs on an NPU: experts."""
