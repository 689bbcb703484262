"""Scores of fixed images as they were when this was written: whoever rewrites a metric is held to its numbers.

All features are whole numbers over a power of two, which float32 holds, so that nothing depends on the machine.
"""

import pytest
import torch

from moh_vision.evaluation.fidelity import Extracted, Extractor, score

EXPECTED = dict(
    fid=4.7141721713383, sfid=11.6046563716175, inception_score=1.8621569321379, precision=229 / 240, recall=103 / 160
)


class Whole(Extractor):
    """12 features with a common offset, 20 spatial ones and 5 classes of 8 x 8 images."""

    name, published, weights_sha256 = "whole", True, "0" * 64

    def __init__(self, offset):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.weights = [torch.randint(-3, 4, (192, n), generator=g).double() for n in (12, 20, 5)]
        self.offset = offset

    def forward(self, images):
        x = images.flatten(1).double() - 128
        pooled, spatial, logits = (x @ weights / 2**10 for weights in self.weights)
        return Extracted(pooled + self.offset, spatial, logits)


def images(count, seed):
    coarse = torch.randint(0, 256, (count, 3, 4, 4), generator=torch.Generator().manual_seed(seed))
    return coarse.repeat_interleave(2, 2).repeat_interleave(2, 3)


# With a larger offset the kernel distance has no digits left, whatever it is computed in.
@pytest.mark.parametrize("offset, kid", [(0, 1.47181819412974), (16, 32742.5990532365), (1024, None)])
def test_scores_of_fixed_inputs(offset, kid):
    generated, reference = (images(240, 1) // 8 * 7 + 40).clamp(max=255), images(160, 2)
    result = score(generated.byte(), reference.byte(), extractor=Whole(offset), batch_size=64)
    for name, want in {**EXPECTED, **({"kid": kid} if kid else {})}.items():
        assert result[name] == pytest.approx(want, rel=1e-9, abs=0), name
