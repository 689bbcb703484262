"""Objectives: what diffusion models are trained for. A new one is a class in a file here and a line in OBJECTIVES.

`contract.Objective` has all that is asked of one; nobody outside this folder asks for its name.
"""

from moh_vision.common.imports import trained_with
from moh_vision.diffusion.objectives.contract import NUM_TIMESTEPS, Objective
from moh_vision.diffusion.objectives.flow import FlowConfig, FlowMatchingLoss
from moh_vision.diffusion.objectives.noise import HybridLoss, NoiseKeys

__all__ = [
    "NUM_TIMESTEPS",
    "OBJECTIVES",
    "FlowConfig",
    "FlowMatchingLoss",
    "HybridLoss",
    "NoiseKeys",
    "Objective",
    "make_objective",
    "names_by_keys",
    "objective_class",
]

OBJECTIVES: dict[str, type[Objective]] = {"noise": HybridLoss, "flow": FlowMatchingLoss}
DEFAULT = "noise"  # of configurations that name none


def objective_class(config: dict) -> type[Objective]:
    """Return the class of the objective that a configuration or a run's metadata names."""
    name = config.get("objective", DEFAULT)
    if name not in OBJECTIVES:
        hint = trained_with(config) or "; one of your own is in a file: --imports FILE"
        raise ValueError(f"objective {name!r} is not one of {', '.join(OBJECTIVES)}{hint}")
    return OBJECTIVES[name]


def names_by_keys() -> dict[str, list[str]]:
    """Return the names of the objectives that read the same keys, by `Objective.keys`."""
    names: dict[str, list[str]] = {Objective.keys: []}
    for name, objective in OBJECTIVES.items():
        names.setdefault(objective.keys, []).append(name)
    return names


def make_objective(config: dict) -> Objective:
    """Return the objective that a configuration or a run's metadata names."""
    return objective_class(config).from_config(config)
