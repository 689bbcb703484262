"""The models, by name in timm's registry. File names here are unique because timm groups models by them."""

from moh_vision.models import moh_dit, moh_vit  # noqa: F401  registers
