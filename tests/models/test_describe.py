import timm
import torch

from moh_vision.models.describe import describe


def test_describe_counts_by_hand():
    """One block of width 8, 2 heads, 4 patches and a class token; router rows: 1 routed candidate of 2, 2 for balance."""
    sizes = dict(img_size=4, patch_size=2, in_chans=1, embed_dim=8, depth=1, num_heads=2, num_classes=3)
    model = timm.create_model("moh_vit_tiny_patch16_224", head_budget=[(1, 1)], **sizes)
    text = describe("tiny", model, torch.zeros(1, 1, 4, 4))
    n, c = 5, 8
    macs = 4 * 4 * c + n * c * 3 * c + 2 * n * n * c + n * c * c + 2 * n * c * 4 * c + c * 3
    assert f"MACs:         {macs:,} dense" in text
    assert f"{100 * (macs + n * c * (1 + 2)) / macs:.1f} % of dense ideal" in text  # the router comes on top
    block = 2 * c * 2 + (c * 3 * c + 3 * c) + (c * c + c) + 3 * c + (c * 4 * c + 4 * c + 4 * c * c + c)
    parameters = (4 * c + c) + c + n * c + block + 2 * c + (3 * c + 3)  # patches, class token, positions; norm, head
    assert f"parameters:   {parameters:,}" in text
    assert "active heads: 2 of 2 (100.0 %)" in text
