"""Register our models with timm, which groups them by file name: keep file names unique."""

from timm.models import _factory, register_notrace_module

from moh_vision.attention import HeadMixtureAttention
from moh_vision.models import dit, transnext, vit  # noqa: F401  registers
from moh_vision.models.registry import CONVERTERS
from moh_vision.models.weights import load_checkpoint

DIFFUSERS = "diffusers.models.transformers.dit_transformer_2d.DiTTransformer2DModel"
CONVERTERS["timm.models.vision_transformer.VisionTransformer"] = "moh_vision.models.vit:convert_vit"
CONVERTERS["timm.models.eva.Eva"] = "moh_vision.models.eva:convert_eva"
CONVERTERS[DIFFUSERS] = "moh_vision.models.dit_transformer:convert_diffusers"
# Feature extraction of timm and torchvision must not trace into this layer: heads are chosen at run time.
register_notrace_module(HeadMixtureAttention)


def _load(model, checkpoint_path, *args, timm_loader=_factory.load_checkpoint, **kwargs):
    if hasattr(model, "checkpoint_filter"):  # our models
        return load_checkpoint(model, checkpoint_path)
    return timm_loader(model, checkpoint_path, *args, **kwargs)


# timm.create_model(..., checkpoint_path=FILE) calls this. timm's own loader reads one layout only, and takes
# "model" from official DiT files, not the EMA with which the paper's tables were made.
_factory.load_checkpoint = _load
