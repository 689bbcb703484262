"""Accuracy of classifiers, and scores of generated images."""
