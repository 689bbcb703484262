"""REPA (Yu 2024, arXiv 2410.06940): tokens of a diffusion model come near a frozen model's features of the clean image."""

from typing import List

from torch import Tensor, nn
from torch.nn import functional as F

WIDEST = 2048  # as released


class Alignment(nn.Module):
    """The projector and the loss of REPA.

    The projector has three linear layers with SiLU in between. It is trained beside the model and is no part of it.

    Args:
        block: whose tokens are aligned, from 1 on.
        weight: of the loss.
        width: C, of the model's tokens. The projector's hidden layers have four times as many, 2048 at most, which base,
            large and xlarge models reach.
        teacher_width: of the teacher's.
    """

    def __init__(self, block: int, weight: float, width: int, teacher_width: int):
        super().__init__()
        self.block, self.weight, hidden = block, weight, min(4 * width, WIDEST)
        self.projector = nn.Sequential(
            nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, teacher_width)
        )

    def forward(self, tokens: List[Tensor], teacher_tokens: Tensor) -> Tensor:
        """One minus the mean cosine similarity of the patches, a scalar in float32: the loss of Yu 2024 plus one.

        Args:
            tokens: [B, N, C] behind every block, of noisy images.
            teacher_tokens: [B, N, teacher_width], of the clean ones.
        """
        projected = self.projector(tokens[self.block - 1])  # [B, N, teacher_width]
        # fp16 would square beyond its range.
        return 1 - F.cosine_similarity(projected.float(), teacher_tokens.float(), dim=-1).mean()
