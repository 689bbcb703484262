"""Sizes of a small ViT."""

TINY = dict(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=6, num_classes=5)
