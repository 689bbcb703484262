"""Time of exported ViT-S in onnxruntime beside PyTorch, in one interleaved run of one thread; prints a table.

    python benchmarks/export.py                # about 3 minutes on an idle core

dense: all 6 heads of each layer. token: each token chooses 3 of them. image: each image does, and the graph gathers their weights;
image, masked: the same in a graph that computes all heads. fixed: the same 3 for all, the others left the graph. Weights are random.
"""

import tempfile
from functools import partial
from pathlib import Path

import onnxruntime
import timm
import torch
from timing import about_machine, cell, interleaved, machine, markdown, to_base
from torch import nn

import moh_vision  # noqa: F401  registers the models
from moh_vision.attention import attention_layers
from moh_vision.commands.export import Classifier, export
from moh_vision.models.fixed_heads import gather_heads, keep_heads

NAME = "moh_vit_small_patch16_224"
SIZE = [3, 224, 224]
HALF = dict(head_budget="uniform:0.5")
CASES = {
    "dense": dict(router="dense"),
    "token": HALF,
    "image": dict(HALF, scope="sample"),
    "image, masked": dict(HALF, scope="sample"),
    "fixed": HALF,
}
BATCHES = (1, 8)
SECONDS = 60.0  # of a batch size
ROUNDS = (9, 15)  # at least and at most


def model_of(case):
    """Make the model of a case, with the same random weights each time."""
    torch.manual_seed(0)
    model = timm.create_model(NAME, **CASES[case]).eval()
    for name, parameter in model.named_parameters():
        if ".router." in name:
            nn.init.normal_(parameter, std=0.3)
    if case == "fixed":
        keep_heads(model, [range(layer.budget.active) for layer in attention_layers(model)])
    return model


def onnx_session(model, folder):
    """Export a model, and open the file in one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    file = Path(folder, "model.onnx")
    export(Classifier(model, SIZE), file, "onnx")
    return onnxruntime.InferenceSession(file.read_bytes(), options)


@torch.no_grad()
def main():
    torch.set_num_threads(1)
    models = {case: model_of(case) for case in CASES if "masked" not in case}
    sessions = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            model = model_of(case)
            if case == "image":
                gather_heads(model)
            sessions[case] = onnx_session(model, folder)
    rows = []
    for batch in BATCHES:
        images = torch.randn(batch, *SIZE)
        inputs = {"images": images.numpy()}
        steps = {}
        for case, model in models.items():
            steps[f"PyTorch {case}"] = partial(model, images)
        for case, session in sessions.items():
            steps[f"onnxruntime {case}"] = partial(session.run, None, inputs)
        for name, found in to_base(interleaved(steps, ROUNDS, SECONDS)).items():
            ratio = cell(found["ratio"], found["quartiles"])
            rows.append([str(batch), *name.split(" ", 1), ratio, str(found["rounds"])])
    columns = ["batch", "runtime", "heads", "over dense PyTorch [quartiles]", "rounds"]
    print(NAME, about_machine(dict(machine=machine())))
    print(markdown(columns, rows), end="")


if __name__ == "__main__":
    main()
