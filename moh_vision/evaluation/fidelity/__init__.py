"""Scores of generated images: FID, sFID, inception score, KID, precision, recall, in one pass of the network.

torch-fidelity has the network and the distances. What it lacks is here: sFID, .npz files and iterators, moments that are
accumulated instead of kept features, several processes, and ADM's conventions (splits of 5000 in file order, precision
and recall on Inception's features).
"""

from moh_vision.evaluation.fidelity.extractors import (
    Extracted,
    Extractor,
    Inception,
    TimmExtractor,
    make_extractor,
)
from moh_vision.evaluation.fidelity.reference import Reference, statistics_of
from moh_vision.evaluation.fidelity.scoring import score
from moh_vision.evaluation.fidelity.statistics import Statistics, load_statistics

__all__ = [
    "Extracted",
    "Extractor",
    "Inception",
    "Reference",
    "Statistics",
    "TimmExtractor",
    "load_statistics",
    "make_extractor",
    "score",
    "statistics_of",
]
