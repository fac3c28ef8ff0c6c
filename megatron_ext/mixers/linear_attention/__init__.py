"""Causal linear attention with ELU + 1 features, normalised."""
