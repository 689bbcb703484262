"""Measures of what a model does; extractors and models are handed in."""
