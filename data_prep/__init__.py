"""Corpora into Megatron's indexed shards. Imports neither torch nor Megatron."""
