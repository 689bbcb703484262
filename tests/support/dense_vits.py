"""Small dense ViTs of timm, and images for them."""

import timm
import torch

SMALL = dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=6, num_classes=5)
VIT = "vit_small_patch16_224"
DINOV3 = "vit_small_patch16_dinov3"
EVA02 = "eva02_tiny_patch14_224"
DEIT = "deit_tiny_distilled_patch16_224"


def dense(name=VIT, **kwargs):
    """Return a small ViT whose parameters, zeros and ones included, are perturbed so that each shows in the output."""
    torch.manual_seed(3)
    model = timm.create_model(name, **{**SMALL, **kwargs}).eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


def images(n=4, height=32, width=32):
    return torch.randn(n, 3, height, width)
