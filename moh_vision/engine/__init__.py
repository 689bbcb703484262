"""Checkpoints, steps, logging and the end of a process, for any model. Imports nothing of ours."""
