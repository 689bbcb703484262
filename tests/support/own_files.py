"""Files of a user's own, which --imports names: an objective and a router that the package does not have."""

import sys

from moh_vision.attention import ROUTERS
from moh_vision.data.splits import SOURCES
from moh_vision.diffusion import OBJECTIVES, SAMPLERS

OBJECTIVE = '''"""The cosine interpolant: x_t = cos(a) x_0 + sin(a) eps with a = pi t / 2."""

import math

from moh_vision.diffusion import OBJECTIVES, Objective, Prediction


def draw_time(rng):
    return 1000 * rng.random()


def coefficients(t, like):
    a = (math.pi / 2 * t / 1000).to(like.dtype).view(-1, 1, 1, 1)
    return a.cos(), a.sin()


class CosineInterpolant(Objective):
    prediction = Prediction(path="cosine", predict="velocity")
    draw = staticmethod(draw_time)

    def __init__(self, weight: float = 1.0):
        super().__init__()
        self.weight = weight

    def add_noise(self, x0, noise, t):
        cos, sin = coefficients(t, x0)
        return cos * x0 + sin * noise

    def forward(self, output, x0, xt, noise, t):
        cos, sin = coefficients(t, x0)
        velocity = math.pi / 2 * (cos * noise - sin * x0)
        mse = (output.float() - velocity).square().flatten(1).mean(1)
        return dict(loss=self.weight * mse, mse=mse)


OBJECTIVES["cosine"] = CosineInterpolant
'''
ROUTER = '''"""Runs the heads whose learned directions are nearest to the token."""

import torch
from torch import nn
from torch.nn import functional as F

from moh_vision.attention import ROUTERS
from moh_vision.attention.kernels.eager import choose
from moh_vision.attention.routers.common import TopKRouter


class NearestRouter(TopKRouter):
    aux_loss = "moa"
    shared_share = 0.0

    def __init__(self, dim, budget, device=None, dtype=None):
        super().__init__(budget)
        self.directions = nn.Parameter(torch.randn(budget.heads, dim, device=device, dtype=dtype))

    def forward(self, x, q=None, padding_mask=None):
        logits = 10 * F.normalize(x, dim=-1) @ F.normalize(self.directions, dim=-1).T
        heads, k = self.num_candidates, self.num_routed
        return choose(logits, heads, 0, k, "renormalised", padding_mask=padding_mask)


ROUTERS["nearest"] = NearestRouter
'''


class OwnFiles:
    """Writes files of a user's own, and makes the process forget what it imported of them."""

    def __init__(self, folder):
        self.folder = folder

    def write(self, name: str, text: str) -> str:
        """Write FOLDER/NAME.py; return its path."""
        path = self.folder / f"{name}.py"
        path.write_text(text)
        return str(path)

    def forget(self) -> None:
        """Forget the files, as a new process would that does not import them."""
        for table in (OBJECTIVES, ROUTERS, SAMPLERS, SOURCES):
            for name in [name for name, entry in table.items() if self._wrote(entry)]:
                del table[name]
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(str(self.folder)):
                del sys.modules[name]
        sys.path[:] = [path for path in sys.path if path != str(self.folder)]

    def _wrote(self, entry) -> bool:
        """Return whether an entry of a table is defined in one of the files."""
        module = sys.modules.get(getattr(entry, "__module__", ""))
        return str(getattr(module, "__file__", None)).startswith(str(self.folder))
