"""Log-linear attention with adaptive memory decay."""
