"""Classification: training and validation."""
