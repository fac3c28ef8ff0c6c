"""Softmax attention: grouped queries, RoPE, optional QK norm and window."""
