"""The models, by name in timm's registry. File names here are unique because timm groups models by them."""

from timm.models import register_notrace_module

from moh_vision.attention import HeadMixtureAttention
from moh_vision.models import dit, transnext, vit  # noqa: F401  registers
from moh_vision.models.registry import register
from moh_vision.models.timm_factory import read_checkpoints_of_our_models

register("converter", "timm.models.vision_transformer.VisionTransformer", "moh_vision.models.vit:convert_vit")
register(
    "converter",
    "diffusers.models.transformers.dit_transformer_2d.DiTTransformer2DModel",
    "moh_vision.models.dit_transformer:convert_diffusers",
)
# A leaf for timm's and torchvision's feature extraction: which heads run is known only when it runs.
register_notrace_module(HeadMixtureAttention)
read_checkpoints_of_our_models()
