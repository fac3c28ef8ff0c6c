"""Stochastic Attention, sliding-window attention, and the two gated together."""
