"""`SeparateHeadMixtureAttention`: one module each for queries, keys and values."""

from typing import Any

from torch import Tensor, nn

from moh_vision.attention.layer import HeadMixtureAttention
from moh_vision.attention.routing import Call


class SeparateHeadMixtureAttention(HeadMixtureAttention):
    """`HeadMixtureAttention` with LLaMA's parameter names, which checkpoints have and by which adapters find modules.

    Parameters: q_proj.weight [H * D, C], k_proj.weight and v_proj.weight [kv_heads * D, C], o_proj.weight [C, H * D];
    router.*. Where all heads are projected, the projections are called as modules; their weights are not read.
    """

    def add_inputs(self, dim: int, bias: bool, **dd: Any) -> None:
        for name, rows in zip(("q_proj", "k_proj", "v_proj"), self.rows):
            setattr(self, name, nn.Linear(dim, rows, bias=bias, **dd))

    def add_output(self, dim: int, bias: bool, **dd: Any) -> None:
        self.o_proj = nn.Linear(self.q_dim, dim, bias=bias, **dd)

    @property
    def projections(self) -> tuple[nn.Module, ...]:
        return self.q_proj, self.k_proj, self.v_proj, self.o_proj

    @property
    def proj(self) -> nn.Module:
        """The output projection, as executors call it."""
        return self.o_proj

    def weights(self) -> list[tuple[Tensor, Tensor | None]]:
        return [(linear.weight, linear.bias) for linear in (self.q_proj, self.k_proj, self.v_proj)]

    def joint_weight(self) -> nn.Parameter | None:
        return None

    def project_all(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        return self.project_queries(call.x), *self.project_keys_values(call.x)

    def project_queries(self, x: Tensor) -> Tensor:
        return self.by_head(self.q_proj(x))

    def project_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.by_head(self.k_proj(x)), self.by_head(self.v_proj(x))
