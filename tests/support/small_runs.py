"""Small training runs, and functions that read and compare their results."""

import functools
import hashlib
import importlib
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support.small_text import write_pairs, write_plain

# Name of a small run -> its options.
SMALL = dict(
    cls="--config configs/quickstart/cls.yaml --model.depth 2 --model.embed_dim 32 --optim.batch_size 8 --data.workers 0",
    transnext="--data.root digits --data.img_size 64 --data.augment none --data.workers 0 --data.eval_batch_size 50 "
    "--model.name moh_transnext_small_75 --model.head_budget uniform:0.5 --model.kwargs.embed_dims [8,16,16,32] "
    "--model.kwargs.num_heads [2,4,4,8] --model.kwargs.depths [1,1,1,1] --optim.batch_size 6",
    dit="--config configs/quickstart/dit.yaml --model.depth 2 --model.embed_dim 32 --optim.batch_size 8 --label_drop 0.1",
    text="--model.name mt_mae_7 --model.kwargs.hidden_size 32 --model.kwargs.intermediate_size 64 "
    "--model.kwargs.num_attention_heads 4 --model.kwargs.encoder_layers 1 --model.kwargs.decoder_layers 1 "
    "--data.source de --data.target en --data.merges 60 --data.max_tokens 200 --data.max_length 60 --generate.beam 1 --generate.max_length 8 "
    "--optim.lr 1e-3 --optim.warmup_steps 20",
    clm="--model.name clm_moh_small_75 --model.kwargs.hidden_size 32 --model.kwargs.intermediate_size 64 "
    "--model.kwargs.num_attention_heads 8 --model.kwargs.num_key_value_heads 8 --model.kwargs.num_hidden_layers 2 "
    "--data.val valid --data.merges 20 --data.block 16 --optim.batch_size 4 --optim.lr 1e-2 --optim.warmup_steps 1",
    mlm="--model.name mlm_moa_2K4E8D --model.kwargs.hidden_size 32 --model.kwargs.intermediate_size 64 "
    "--model.kwargs.num_hidden_layers 2 --data.val valid --data.merges 20 --data.block 16 --optim.batch_size 4 "
    "--optim.lr 1e-2 --optim.warmup_steps 1",
)


# Name of a small run -> the package of its wing.
WINGS = dict(
    cls="classification",
    transnext="classification",
    dit="diffusion",
    text="language",
    clm="language",
    mlm="language",
)


def script(name):
    """Return the module `train` of a small run's wing, whose `main` the training script calls."""
    return importlib.import_module(f"moh_vision.{WINGS[name]}.train")


@functools.cache
def pairs() -> str:
    """Return a folder of pairs of sentences, which exists until the process ends."""
    # The attribute keeps the object alive; the folder is deleted with it.
    pairs.folder = tempfile.TemporaryDirectory(prefix="pairs-")
    return str(write_pairs(Path(pairs.folder.name)))


@functools.cache
def plain() -> str:
    """Return a folder of text in one language, which exists until the process ends."""
    plain.folder = tempfile.TemporaryDirectory(prefix="plain-")
    return str(write_plain(Path(plain.folder.name), train=60, val=10))


def arguments(name, output, steps, save_every, *more):
    """Return the command line of a small run of SMALL."""
    argv = SMALL[name].split()
    if name == "text":
        argv += ["--data.root", pairs()]
    if name in ("clm", "mlm"):
        argv += ["--data.root", plain()]
    every = f"--log-every 1 --max-steps {steps} --save-every {save_every} --output {output}"
    return [*argv, *every.split(), *map(str, more)]


def losses(folder, name):
    """Return [(step, loss in hexadecimal)] from NAME.losses in the order of the steps, repeated ones included."""
    file = folder / f"{name}.losses"
    if not file.exists():
        return []
    rows = [line.split(" ", 1) for line in file.read_text().splitlines()]
    return [(int(step), value) for step, value in rows]


def outcome(run):
    """Return what two equal runs end with: hashes of the tensors in their weights and newest checkpoint, and plain values.

    Files are hashed tensor by tensor, because their metadata name the folder of the run.
    """
    newest = max(
        (run / "checkpoints").glob("step_*"), key=lambda p: int(p.name.removeprefix("step_"))
    )
    record = json.loads((newest / "step.json").read_text())
    digests = {}
    for path in (*newest.glob("*.safetensors"), *run.glob("[me]*.safetensors")):
        digest = hashlib.sha256()
        for key, value in sorted(load_file(path).items()):
            digest.update(f"{key} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.numpy().tobytes())
        digests[str(path.relative_to(run))] = digest.hexdigest()
    return digests | {key: record[key] for key in ("step", "optimizers", "scaler")}


def whole_and_resumed(name, folder, stops, *more):
    """Run to stops[-1] at once, and by stopping and resuming at each of `stops`; return the folders of both runs.

    Asserts that both end with the same bits.
    """
    for run, ends in (("whole", stops[-1:]), ("resumed", stops)):
        for steps in ends:
            script(name).main(arguments(name, folder / run, steps, 100, *more))
    assert outcome(folder / "whole") == outcome(folder / "resumed")
    assert logged(folder / "whole")[-1]["loss"] == logged(folder / "resumed")[-1]["loss"]
    return folder / "whole", folder / "resumed"


def checkpoint_steps(run):
    """Return the steps of a run's checkpoints in increasing order."""
    return sorted(int(p.name.removeprefix("step_")) for p in (run / "checkpoints").glob("step_*"))


def entries(run):
    """Return the entries of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def logged(run):
    """Return the entries of metrics.jsonl that are of training steps."""
    return [entry for entry in entries(run) if "loss" in entry]


def results(run):
    return json.loads((run / "results.json").read_text())


def same(one, other):
    """Return whether two sets of named tensors are equal to the bit; each is a dict, a module or a safetensors file."""
    one, other = (tensors(thing) for thing in (one, other))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def tensors(thing):
    """Return the {name: tensor} of a module, a dict or a safetensors file."""
    if isinstance(thing, torch.nn.Module):
        return thing.state_dict()
    if isinstance(thing, dict):
        return thing
    return load_file(thing)
