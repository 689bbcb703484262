"""Training runs of any model: configuration, steps, checkpoints, logs, signals. Imports only attention/ and common/."""
