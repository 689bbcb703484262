"""Language models: translation, masked and causal language models, and LLaMA with routed heads.

Importing it registers what other rooms look up by name; nothing here needs the packages of the extra "text" before it is
used.
"""

from typing import TYPE_CHECKING, Any

from moh_vision.models.registry import register

if TYPE_CHECKING:
    from moh_vision.language.models.create import create_text_model

__all__ = ["create_text_model"]

register(
    "converter", "transformers.modeling_utils.PreTrainedModel", "moh_vision.language.models.llama.model:convert_llama"
)
register("run", "vocabularies", "moh_vision.language.models.weights:text_from_run")
register("counter", "text", "moh_vision.language.models.counts:count_preset")
register("suites", "text", "moh_vision.language.evaluation.lm_suites:SUITES")
register("calibration", "text", "moh_vision.language.calibration:open_calibration")
register("gates", "text", "moh_vision.language.evaluation.gate_report:open_gates")
register("scores", "text", "moh_vision.language.calibration:open_scored")
register("pairs", "text", "moh_vision.language.data.sources:find_pairs")


def __getattr__(name: str) -> Any:
    if name == "create_text_model":  # imports transformers
        from moh_vision.language.models.create import create_text_model

        return create_text_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
