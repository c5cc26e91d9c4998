"""The command line, nothing else."""
