"""What every run needs and no model: checkpoints, steps, logging, the end of a process. Imports nothing of ours."""
