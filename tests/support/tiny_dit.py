"""A DiT of a few channels."""

import torch

TINY = dict(img_size=8, in_chans=3, num_classes=5, embed_dim=32, depth=2, num_heads=4)


def awake(model):
    """Draw all weights at random: in a new DiT every block is the identity and the output is 0."""
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.2)
    return model
