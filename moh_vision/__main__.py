"""List the commands: `python -m moh_vision`; explain one: `python -m moh_vision COMMAND --help`."""

import sys
from importlib import import_module
from types import ModuleType

from moh_vision.commands.command import run_command
from moh_vision.common.errors import closest, user_errors
from moh_vision.common.progress import say

COMMANDS = {
    "table": "scores, sizes and MACs of runs, as the papers print them",
    "report": "one HTML page about runs",
    "curves": "learning curves of runs, or their scores over a key",
    "head-load": "which heads ran, by class, timestep, text or task",
    "gates": "what the gates of language models do with a text",
    "patches": "which heads each patch of an image runs",
    "measure": "the time that a model saves on this machine when it skips heads",
    "budget-curve": "score and latency over the share of active heads",
    "sampling-curve": "scores of samples over guidance, its interval, steps, the sampler, a cache or EMA",
    "alignment": "how near the features of a diffusion model's blocks are to a teacher's (REPA)",
    "search": "a budget of heads or MLP groups for a trained model, found without training",
    "predict": "name what is on images",
    "export": "write a model as ONNX or torch.export's .pt2",
    "publish": "write a folder for timm, diffusers or transformers, with a model card",
    "shards": "write images as webdataset shards",
    "latents": "encode images with a VAE, once for all epochs",
    "tokenise": "write text as token ids",
    "fidelity": "FID, sFID, IS, KID, precision and recall of images",
    "lm": "scores of a causal language model: tasks of the lm-evaluation-harness",
    "kernels": "build the C++ operators of the attention core",
}


def command_of(name: str) -> ModuleType:
    """Import a command's module, see `run_command`; those of moh_vision/commands have its name."""
    match name:
        case "shards":
            from moh_vision.data import write_shards as command
        case "latents":
            from moh_vision.diffusion.latents import write_latents as command
        case "tokenise":
            from moh_vision.language.data import tokenise as command
        case "fidelity":
            from moh_vision.evaluation.fidelity import __main__ as command
        case "lm":
            from moh_vision.language.evaluation import lm as command
        case "kernels":
            from moh_vision.attention.kernels import __main__ as command
        case _:
            command = import_module(f"moh_vision.commands.{name.replace('-', '_')}")
    return command


def main(argv: list[str] | None = None) -> int:
    """Run a command; return its exit code: 0, 2 for a user's mistake, 130 when interrupted."""
    if argv is None:
        argv = sys.argv[1:]
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        say("usage: python -m moh_vision COMMAND ...\n\nwith COMMAND one of\n")
        say("\n".join(f"  {command:{width}}  {line}" for command, line in COMMANDS.items()))
        say("\nOf each: python -m moh_vision COMMAND --help")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        problem = f"{name}: no such command, {closest(name, COMMANDS)}"
        print(f"moh_vision: error: {problem}", file=sys.stderr)
        return 2
    with user_errors(name, ()):  # the package of an extra may be missing
        command = command_of(name)
    return run_command(name, command, rest)


if __name__ == "__main__":
    raise SystemExit(main())
