"""Forgetting attention (FoX): softmax attention with a forget gate."""
