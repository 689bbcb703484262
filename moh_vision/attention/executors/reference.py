"""The oracle: equation (*) as a loop over heads, without any fused kernel. Slow, for tests."""

import torch
from torch import Tensor
from torch.nn import functional as F

from moh_vision.attention.executors.masked import Masked, attention_matrix


class Reference(Masked):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        call, (B, H, N, _), (_, G, M, _) = self.call, q.shape, k.shape
        mask = call.attn_mask
        if mask is not None:
            mask = mask.expand(B, H, N, M)
        heads = []
        for h in range(H):
            g = h * G // H  # its key-value head
            matrix = attention_matrix(q[:, h], k[:, g], None if mask is None else mask[:, h], call.is_causal)
            heads.append(F.dropout(matrix, call.dropout_p) @ v[:, g])
        return torch.stack(heads, 1)
