"""Conversion of a checkpoint to a small one."""
