"""Inception with random weights, in the layout of the published file: they prove the wiring and its cost, not scores."""

from unittest import mock

import torch
from torch import nn
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3


def write_random_inception(path):
    """Write a file of random weights, 23.9 million parameters."""
    torch.manual_seed(0)
    with (
        mock.patch.object(torch, "load"),
        mock.patch.object(FeatureExtractorInceptionV3, "load_state_dict"),
    ):
        network = FeatureExtractorInceptionV3("random", ["2048"], "none")
    for module in network.modules():
        if isinstance(module, nn.Conv2d):  # the default one dies out over so many layers
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    torch.save(network.state_dict(), path)
