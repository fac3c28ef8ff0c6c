"""Runs as SLURM jobs: the batch script, what runs in each of its tasks, and watching it."""
