"""Language models: translation, masked and causal models, and LLaMA with routed heads.

Importing this package needs none of the packages of the extra "text": `create_text_model` is imported on first access.
"""

from typing import TYPE_CHECKING, Any

from moh_vision.models.registry import CONVERTERS

if TYPE_CHECKING:
    from moh_vision.language.models.create import create_text_model

__all__ = ["create_text_model"]

# Model class and converter by name, so that nothing is imported before a model is converted.
TRANSFORMERS = "transformers.modeling_utils.PreTrainedModel"
CONVERTERS[TRANSFORMERS] = "moh_vision.language.models.llama.model:convert_llama"


def __getattr__(name: str) -> Any:
    if name == "create_text_model":  # imports transformers
        from moh_vision.language.models.create import create_text_model

        return create_text_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
