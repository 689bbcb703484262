"""REPA (Yu 2024, arXiv 2410.06940): align a diffusion model's tokens with a frozen model's features."""

from typing import List

from torch import Tensor, nn
from torch.nn import functional as F

WIDEST = 2048  # as released


class Alignment(nn.Module):
    """The projector and the loss of REPA. The projector is no part of the model.

    `block`, counted from 1, is the one whose tokens, `width` wide, are aligned.
    """

    def __init__(self, block: int, weight: float, width: int, teacher_width: int):
        super().__init__()
        self.block, self.weight, hidden = block, weight, min(4 * width, WIDEST)
        self.projector = nn.Sequential(
            nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, teacher_width)
        )

    def forward(self, tokens: List[Tensor], teacher_tokens: Tensor) -> Tensor:
        """Return one minus the mean cosine similarity of patches: the loss of Yu 2024 plus one.

        `tokens` of noisy images are [B, N, C] after every block; `teacher_tokens` of clean ones [B, N, width].
        """
        projected = self.projector(tokens[self.block - 1])  # [B, N, teacher_width]
        # fp16 would square beyond its range.
        return 1 - F.cosine_similarity(projected.float(), teacher_tokens.float(), dim=-1).mean()
