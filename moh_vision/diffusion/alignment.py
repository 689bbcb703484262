"""REPA (Yu 2024): align a diffusion model's tokens with a frozen model's features."""

from torch import Tensor, nn
from torch.nn import functional as F

WIDEST = 2048  # as released


class Alignment(nn.Module):
    """The loss of the tokens after a `block`, counted from 1, and its projector, no part of the model."""

    def __init__(self, block: int, weight: float, width: int, teacher_width: int):
        super().__init__()
        self.block, self.weight, hidden = block, weight, min(4 * width, WIDEST)
        self.projector = nn.Sequential(
            nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, teacher_width)
        )

    def forward(self, tokens: list[Tensor], teacher_tokens: Tensor) -> Tensor:
        """Return one minus the mean cosine similarity of patches: the loss of Yu 2024 plus one."""
        projected = self.projector(tokens[self.block - 1])  # [B, N, teacher_width]
        # fp16 would square beyond its range.
        return 1 - F.cosine_similarity(projected.float(), teacher_tokens.float(), dim=-1).mean()
