"""Ops on DTensors: which axes may be sharded, and what the devices communicate."""
