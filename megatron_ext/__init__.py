"""Megatron-core, extended with pluggable sequence mixers. Importing this imports nothing heavy."""
