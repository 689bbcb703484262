"""Training runs of any model: configuration, steps, checkpoints, logging, signals. Imports attention/ and common/ only."""
