"""Kaczmarz linear attention and its delta-rule relatives."""
