"""Asking a trained model: generation and evaluation."""
