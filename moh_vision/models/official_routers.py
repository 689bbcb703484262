"""How the published MoH code names its routers."""

import re
from typing import Dict

from torch import Tensor

NAMES = {"wg": "routed", "wg_0": "balance", "wg_1": "shared"}


def rename_routers(state_dict: Dict[str, Tensor]) -> Dict[str, Tensor]:
    """attn.wg, attn.wg_0 and attn.wg_1 -> our attn.router.routed, .balance and .shared; other names stay."""
    return {
        re.sub(r"\.attn\.(wg|wg_0|wg_1)\.", lambda m: f".attn.router.{NAMES[m[1]]}.", name): tensor
        for name, tensor in state_dict.items()
    }
