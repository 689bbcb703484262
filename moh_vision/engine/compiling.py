"""torch.compile in a run: of its whole task, or of the blocks of its model one by one."""

import os

import torch
from accelerate.utils import DynamoBackend
from torch import nn

VERSIONS = 8  # PyTorch's default limit of what is compiled for one function


def compile_task(task: nn.Module, compiles: bool | str) -> None:
    """Compile a task in place: names of weights stay, and hooks that are added later still run.

    Args:
        task: has the model as its attribute `model`.
        compiles: the key `compile`: False, True for the whole task, or "blocks" for the blocks of its model.
    """
    if compiles == "blocks":
        compile_blocks(task.model)
    elif compiles:
        task.compile()


def compile_blocks(model: nn.Module) -> None:
    """Compile each block of a model in place. Blocks that differ in their weights alone share compiled code."""
    blocks = blocks_of(model)
    if not blocks:
        raise ValueError(
            f"compile blocks: {type(model).__name__} is no sequence of equal blocks; allowed: true, false"
        )
    # PyTorch counts the versions of a function, which all blocks share: let each block have as many as a model has.
    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, VERSIONS * len(blocks))
    for block in blocks:
        block.compile()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: what a sequence of modules of one class repeats, of nested sequences the innermost.

    accelerate's `compile_regions` finds no nn.Sequential, which timm's blocks are in.
    """
    repeated = []
    for sequence in model.modules():
        if not isinstance(sequence, (nn.ModuleList, nn.Sequential)):
            continue
        classes = {type(module) for module in sequence}
        if len(classes) == 1:
            # A module without parts is one layer, such as an embedding.
            repeated += [module for module in sequence if list(module.children())]
    known = set(repeated)
    return [module for module in repeated if known.isdisjoint(set(module.modules()) - {module})]


def launched_backend(accelerator) -> str:
    """Return the backend of torch.compile that accelerate was launched with; "" if it compiles nothing."""
    backend = accelerator.state.dynamo_plugin.backend
    if backend == DynamoBackend.NO:
        return ""
    return backend.value.lower()


def check_compilation(accelerator, compiles: bool | str, accumulation: int) -> None:
    """Raise ValueError if accelerate or PyTorch was told to compile as this run cannot.

    Args:
        accelerator: accelerate's Accelerator.
        compiles: the key `compile`.
        accumulation: micro-batches of a step.
    """
    backend = launched_backend(accelerator)
    if backend and compiles:
        raise ValueError(
            f"accelerate was launched with dynamo_backend {backend}, and compile is {compiles}: give one of the two"
        )
    if accumulation == 1 or not (backend or compiles):
        return
    mode = accelerator.state.dynamo_plugin.mode
    graphs = ""
    if backend == "cudagraphs":
        graphs = f"dynamo_backend {backend}"
    elif backend and mode in ("reduce-overhead", "max-autotune"):
        graphs = f"dynamo_mode {mode}"
    elif os.environ.get("TORCHINDUCTOR_CUDAGRAPHS") == "1":
        graphs = "TORCHINDUCTOR_CUDAGRAPHS 1"
    if graphs:
        raise ValueError(
            f"{graphs} with optim.accumulation {accumulation}: PyTorch's CUDA graphs overwrite the gradients of the "
            "micro-batch before; set optim.accumulation 1, or compile without graphs"
        )
