"""REPA (Yu 2024, arXiv 2410.06940): tokens of a diffusion model come near a frozen model's features of the clean image."""

from typing import List

from torch import Tensor, nn
from torch.nn import functional as F

WIDEST = 2048  # as released


class Alignment(nn.Module):
    """The projector and the loss of REPA. The projector is trained beside the model and is not part of it.

    The tokens of block number `block`, from 1, are aligned. The hidden layers are four times as wide as
    the model's tokens, `width`, and at most 2048, which base and larger models reach.
    """

    def __init__(self, block: int, weight: float, width: int, teacher_width: int):
        super().__init__()
        self.block, self.weight, hidden = block, weight, min(4 * width, WIDEST)
        self.projector = nn.Sequential(
            nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, teacher_width)
        )

    def forward(self, tokens: List[Tensor], teacher_tokens: Tensor) -> Tensor:
        """Return one minus the mean cosine similarity of the patches, in float32: the loss of Yu 2024 plus one.

        `tokens`, of noisy images, are [B, N, C] after every block; `teacher_tokens`, of the clean images, [B, N,
        width].
        """
        projected = self.projector(tokens[self.block - 1])  # [B, N, teacher_width]
        # fp16 would square beyond its range.
        return 1 - F.cosine_similarity(projected.float(), teacher_tokens.float(), dim=-1).mean()
