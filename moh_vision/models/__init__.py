"""Models in timm's registry. timm groups them by file name: keep file names unique."""

from timm.models import _factory, register_notrace_module

from moh_vision.attention import GroupMixtureMlp, HeadMixtureAttention
from moh_vision.models import dit, transnext, vit  # noqa: F401  registers
from moh_vision.models.registry import CONVERTERS
from moh_vision.models.weights import load_checkpoint

DIFFUSERS = "diffusers.models.transformers.dit_transformer_2d.DiTTransformer2DModel"
CONVERTERS["timm.models.vision_transformer.VisionTransformer"] = "moh_vision.models.vit:convert_vit"
CONVERTERS["timm.models.eva.Eva"] = "moh_vision.models.eva:convert_eva"
CONVERTERS[DIFFUSERS] = "moh_vision.models.dit_transformer:convert_diffusers"
# A leaf for timm's and torchvision's feature extraction: heads are chosen at run time.
register_notrace_module(HeadMixtureAttention)
register_notrace_module(GroupMixtureMlp)


def _load(model, checkpoint_path, *args, theirs=_factory.load_checkpoint, **kwargs):
    if hasattr(model, "checkpoint_filter"):
        return load_checkpoint(model, checkpoint_path)
    return theirs(model, checkpoint_path, *args, **kwargs)


# For timm.create_model(..., checkpoint_path=FILE): timm reads one layout, and of official DiTs the "model"
# weights, not the EMA of the papers' tables.
_factory.load_checkpoint = _load
