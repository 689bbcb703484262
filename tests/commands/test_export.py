"""Exported models compute what the model computes, and models with fixed heads hold the weights of these heads only."""

import json
import sys
from math import nan

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from moh_vision.attention import attention_layers, head_budget, token_heads
from moh_vision.attention.model_heads import budget_rows
from moh_vision.commands import export as exporting
from moh_vision.models.fixed_heads import busiest, computed_groups, gather_heads, keep_heads
from moh_vision.models.head_budgets import set_head_budget
from moh_vision.models.head_load import HeadLoad
from tests.support.refusals import assert_says, refuse

VIT = dict(img_size=8, patch_size=4, in_chans=1, num_classes=3, embed_dim=16, depth=2, num_heads=4)
DIT = dict(img_size=4, in_chans=1, num_classes=3, embed_dim=16, depth=2, num_heads=4)
BY_TIMESTEP = dict(DIT, scope="sample", route_by="timestep")
BUDGET = [[1, 1], [2, 1]]
BLOCK = dict(
    norm_layer="rmsnorm",
    use_rot_pos_emb=True,
    qk_norm=True,
    class_tokens=2,
    class_tokens_start=0,
)
ONE = dict(depth=1, head_budget=[[1, 1]])  # one layer, because an export takes seconds
NAMES = dict(vit="moh_vit_tiny_patch16_224", dit="moh_dit_small_patch2_75")
WINGS = dict(vit="classification", dit="diffusion")


def model_of(family, arguments, **more):
    """Return a model with random weights, so that its gates differ."""
    torch.manual_seed(0)
    options = {"head_budget": BUDGET, **arguments, **more}
    model = timm.create_model(NAMES[family], **options).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def run(tmp_path):
    """run(family, arguments) writes the weights of a new model as a run does; it returns the model and the folder."""

    def write(family, arguments):
        model = model_of(family, arguments)
        about = dict(
            architecture=NAMES[family],
            arguments={"head_budget": BUDGET, **arguments},
            classes=["a", "b", "c"],
            config=dict(objective="noise", learn_sigma=True, noise_schedule="linear"),
            step=1,
        )
        metadata = {key: json.dumps(value) for key, value in about.items()}
        folder = tmp_path / family
        folder.mkdir()
        (folder / "config.yaml").write_text(f"kind: {WINGS[family]}")
        state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(state, folder / "model.safetensors", metadata)
        return model, str(folder)

    return write


@pytest.fixture
def to_onnx(run_command, tmp_path):
    """to_onnx(*argv) runs the command; it returns what was printed, the file, and an onnxruntime session of it."""
    for name in exporting.PACKAGES:
        pytest.importorskip(name, reason=f"{name} is not installed (extra 'export')")
    import onnxruntime

    def export(*argv):
        file = tmp_path / "model.onnx"
        code, said, _ = run_command("export", *argv, "--format", "onnx", "--output", file)
        assert code == 0
        return said, file, onnxruntime.InferenceSession(file)

    return export


def test_a_classifier_in_onnxruntime(run, to_onnx, tmp_path):
    model, folder = run("vit", {**VIT, **ONE})
    said, file, session = to_onnx(folder)
    assert "computes all 4 and skips none: each token chooses its own 2" in said
    assert "differs from PyTorch" in said
    images = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        want = model(images)
    got = torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
    assert (got - want).abs().max() < 3e-5 * want.abs().max()
    assert session.get_inputs()[0].shape == ["batch", 1, 8, 8]
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["classes"]) == ["a", "b", "c"]
    assert json.loads(about["input_size"]) == [1, 8, 8]
    assert json.loads(about["mean"]) == json.loads(about["std"]) == [0.5]
    assert about["crop_mode"] == "squash"
    # The file names no folder of this machine.
    assert str(tmp_path).encode() not in file.read_bytes()


def test_a_dit_with_static_heads_has_only_these_heads(run, to_onnx, tmp_path):
    """Groups of MLPs stay, for each image to choose."""
    model, folder = run("dit", {**DIT, **ONE, "scope": "sample", "mlp_budget": 0.5})
    load = HeadLoad(budget_rows(model), {"class": ["a"]})
    # The number of tokens for which each of 4 heads and of 8 groups ran, and of all tokens.
    load.sums += torch.tensor([9, 9, 2, 5, 9] + [9, 9, 0, 0, 9, 0, 9, 0, 9])
    load.save(tmp_path / "load.json")
    said, file, session = to_onnx(folder, "--static-heads", tmp_path / "load.json", "--batch", 2)
    assert "heads: 2 of 4 are in the graph" in said
    assert "groups of MLPs: the graph computes 4 of 8, which each image chooses" in said
    inputs = dict(hidden_states=torch.randn(2, 1, 4, 4), timestep=torch.tensor([300.0, 9.0]))
    inputs["class_labels"] = torch.tensor([0, 3])
    keep_heads(model, [[0, 1]])
    with torch.no_grad():
        want = model(**inputs, return_dict=False)[0]
    got = session.run(["sample"], {name: values.numpy() for name, values in inputs.items()})[0]
    assert (torch.from_numpy(got) - want).abs().max() < 3e-5 * want.abs().max()
    assert session.get_modelmeta().custom_metadata_map["heads"] == "fixed"
    import onnx

    weights = onnx.load(file).graph.initializer
    shapes = {tuple(weight.dims) for weight in weights}
    # 2 of 4 heads of width 4: queries, keys and values are 24 wide and not 48.
    assert shapes & {(16, 24), (24, 16)} and not shapes & {(16, 48), (48, 16)}


@pytest.mark.slow  # the norms, rotary positions and class tokens of JiT's block are also in the test of groups
def test_a_dit_with_the_block_of_jit_in_onnxruntime(run, to_onnx):
    model, folder = run("dit", {**DIT, **ONE, **BLOCK, "swiglu_mlp": True})
    _, _, session = to_onnx(folder)
    inputs = dict(hidden_states=torch.randn(3, 1, 4, 4), timestep=torch.tensor([300.0, 9.0, 0.0]))
    inputs["class_labels"] = torch.tensor([0, 3, 1])
    with torch.no_grad():
        want = model(**inputs, return_dict=False)[0]
    got = session.run(["sample"], {name: values.numpy() for name, values in inputs.items()})[0]
    assert (torch.from_numpy(got) - want).abs().max() < 3e-5 * want.abs().max()


def test_torch_export_holds_operators_of_torch_alone(run, tmp_path, run_command):
    """A process without this package can read the file, because it holds no operators of the package."""
    model, folder = run("dit", {**BY_TIMESTEP, **ONE, "swiglu_mlp": True})
    file = tmp_path / "model.pt2"
    code, said, _ = run_command("export", folder, "--format", "torch-export", "--output", file)
    assert code == 0 and "computes 2 of 4, which each image chooses" in said
    inputs = dict(
        hidden_states=torch.randn(4, 1, 4, 4),
        timestep=torch.rand(4) * 1000,
        class_labels=torch.arange(4),
    )
    kept = {"metadata.json": ""}
    program = torch.export.load(file, extra_files=kept)
    with torch.no_grad():
        want = model(**inputs, return_dict=False)[0]
    assert (program.module()(**inputs) - want).abs().max() < 3e-5 * want.abs().max()
    called = {node.target for node in program.graph.nodes if node.op == "call_function"}
    operators = [target for target in called if isinstance(target, torch._ops.OpOverload)]
    assert len(operators) > 10 and {operator.namespace for operator in operators} == {"aten"}
    assert json.loads(json.loads(kept["metadata.json"])["null_label"]) == 3


def test_groups_in_onnxruntime(run, to_onnx):
    """At another share than the saved one; an image computes the groups that it chose."""
    model, folder = run("dit", {**BY_TIMESTEP, **ONE, **BLOCK, "mlp_budget": 0.75})
    said, _, session = to_onnx(folder, "--mlp-budget", "0.5")
    assert "heads: the graph computes 2 of 4" in said
    assert "groups of MLPs: the graph computes 4 of 8, which each image chooses" in said
    set_head_budget(model, mlp=0.5)
    inputs = dict(
        hidden_states=torch.randn(3, 1, 4, 4),
        timestep=torch.tensor([300.0, 9.0, 999.0]),
        class_labels=torch.tensor([0, 3, 1]),
    )
    with torch.no_grad():
        want = model(**inputs, return_dict=False)[0]
    got = session.run(["sample"], {name: values.numpy() for name, values in inputs.items()})[0]
    assert (torch.from_numpy(got) - want).abs().max() < 3e-5 * want.abs().max()


@pytest.mark.slow  # as a DiT above
def test_static_heads_leave_groups_to_each_image(run, tmp_path, run_command):
    model, folder = run("vit", {**VIT, **ONE, "scope": "sample", "mlp_budget": 0.5})
    load = HeadLoad(budget_rows(model), {"class": ["a"]})
    load.sums += torch.tensor([9, 0, 9, 0, 9] + [9, 9, 0, 0, 9, 0, 9, 0, 9])
    load.save(tmp_path / "load.json")
    file = tmp_path / "model.pt2"
    code, said, error = run_command(
        "export", folder, "--format", "torch-export", "--output", file,
        "--static-heads", tmp_path / "load.json",
    )  # fmt: skip
    assert code == 0, error
    assert "heads: 2 of 4 are in the graph" in said
    assert "groups of MLPs: the graph computes 4 of 8, which each image chooses" in said
    keep_heads(model, [[0, 2]])
    images = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        got = torch.export.load(file).module()(images=images)
        torch.testing.assert_close(got, model(images), rtol=1e-5, atol=1e-5)


def test_groups_of_dense_mlps_are_refused(run, tmp_path, run_command):
    _, folder = run("vit", VIT)
    argv = ("export", folder, "--format", "torch-export", "--output", tmp_path / "m.pt2")
    code, _, error = run_command(*argv, "--mlp-budget", "0.5")
    assert code == 2
    assert_says(error, "mlp_budget '0.5' MLPs MoHVisionTransformer dense")


@pytest.mark.parametrize(
    "router, budget",
    [("moh", BUDGET), ("query_norm", BUDGET), ("moa", [[0, 2], [0, 3]])],
    ids=["moh", "query_norm", "moa"],
)
def test_kept_heads_have_the_gates_that_they_have_when_chosen(router, budget):
    model = model_of("vit", VIT, head_budget=budget, router=router, scope="sample").double()
    image = torch.randn(1, 1, 8, 8, dtype=torch.float64)
    kept = [
        routing.active[0, 0].nonzero().flatten().tolist() for routing in token_heads(model, image)
    ]
    assert kept != [[0, 1], [0, 1, 2]]
    with torch.no_grad():
        want = model(image)
        keep_heads(model, kept)
        torch.testing.assert_close(model(image), want, rtol=1e-10, atol=1e-10)
    assert [layer.qkv.out_features for layer in attention_layers(model)] == [24, 36]
    assert head_budget(model)["heads"] == 5


@pytest.mark.parametrize(
    "family, arguments",
    [
        ("vit", dict(VIT, scope="sample", qk_norm=True)),
        ("dit", BY_TIMESTEP),
        ("dit", dict(BY_TIMESTEP, mlp_budget=0.5)),
        ("dit", dict(BY_TIMESTEP, swiglu_mlp=True, use_rot_pos_emb=True, qk_norm=True)),
    ],
    ids=["vit", "dit", "dit with groups", "dit with JiT's block"],
)
def test_gathered_heads_are_those_that_an_image_chooses(family, arguments):
    model = model_of(family, arguments).double()
    size = arguments["img_size"]
    inputs = [torch.randn(5, 1, size, size, dtype=torch.float64)]
    if family == "dit":
        inputs += [torch.arange(5) * 200.0, torch.tensor([0, 1, 2, 3, 0])]
    with torch.no_grad():
        want, _ = model.forward_routed(*inputs)
        assert gather_heads(model) == 5
        every = 16 if "mlp_budget" in arguments else 0
        assert computed_groups(model) == (every // 2, every)
        torch.testing.assert_close(model.forward_routed(*inputs)[0], want, rtol=1e-10, atol=1e-10)
    assert gather_heads(model_of("vit", VIT)) == 8  # each token chooses, so all heads are computed


def test_the_busiest_heads_stay_and_others_are_refused(tmp_path):
    assert busiest(torch.tensor([9.0, 9.0, 1.0, 4.0, 2.0]), 2, 4) == [0, 1, 3, 4]
    model = model_of("vit", VIT)
    file = tmp_path / "load.json"
    load = HeadLoad(head_budget(model)["layers"], {"class": ["a", "b"]})
    load.sums += torch.tensor([10, 2, 5, 3, 10, 10, 10, 1, 9, 10])
    load.save(file)
    fixed = model_of("vit", VIT)
    exporting.fix_heads(fixed, str(file))
    expected = model_of("vit", VIT)
    keep_heads(expected, [[0, 2], [0, 1, 3]])
    assert all(
        torch.equal(a, b) for a, b in zip(fixed.parameters(), expected.parameters(), strict=True)
    )
    refuse("layer 1 all one routed", keep_heads, model_of("vit", VIT), [[0, 2], [0, 1]])
    refuse("layer 0 heads [1, 2] 4 1 rising", keep_heads, model_of("vit", VIT), [[1, 2], [0, 1, 3]])
    scaled = model_of("vit", VIT, router_kwargs=dict(gate_scale="paper"))
    refuse("layer 0 gate_scale 'paper'", keep_heads, scaled, [[0, 2], [0, 1, 3]])


# Without the model, whose export takes seconds.
def of_an_operator_without_onnx(self, images):
    return images.flatten(1) + torch.linalg.matrix_exp(images[:, 0]).mean()


def by_a_value(self, images):
    logits = images.flatten(1)
    return logits if logits.sum() > 0 else -logits


def that_fails(self, images):
    if torch.compiler.is_exporting():
        raise KeyError("scale")
    return self.model(images)


@pytest.mark.parametrize(
    "forward, facts",
    [
        (of_an_operator_without_onnx, "DispatchError ONNX"),
        (by_a_value, "GuardOnDataDependentSymNode"),
        (that_fails, "KeyError 'scale'"),
    ],
)
def test_a_failed_export_says_the_innermost_cause(
    run, tmp_path, run_command, monkeypatch, forward, facts
):
    _, folder = run("vit", {**VIT, **ONE})
    monkeypatch.setattr(exporting.Classifier, "forward", forward)
    output = tmp_path / "m.onnx"
    code, _, error = run_command("export", folder, "--format", "onnx", "--output", output)
    assert code == 2 and error.count("\n") == 1
    assert_says(error, f"moh_vit_tiny_patch16_224 exported {facts}")


def test_a_file_that_differs_is_not_kept(run, tmp_path, run_command, monkeypatch):
    _, folder = run("vit", VIT)

    def assert_refused(facts, form="torch-export", output="m.pt2"):
        """Assert that the command says `facts` and leaves no file."""
        code, _, error = run_command(
            "export", folder, "--format", form, "--output", tmp_path / output
        )
        assert code == 2 and error.count("\n") == 1, error
        assert_says(error, facts)
        assert {path.name for path in tmp_path.iterdir()} == {"vit"}

    monkeypatch.setitem(sys.modules, "onnx", None)
    assert_refused("onnx missing 'moh_vision[export]'", form="onnx", output="m.onnx")

    def wrong(module, file, *more):
        file.write_bytes(b"written")
        return lambda inputs: module(**inputs) * 1.01

    monkeypatch.setattr(exporting, "export", wrong)
    assert_refused("m.pt2 not written differs PyTorch")

    def not_finite(module, *more):
        def run_module(inputs):
            several = len(inputs["images"]) > 1
            return module(**inputs) * (nan if several else 1)

        return run_module

    monkeypatch.setattr(exporting, "export", not_finite)
    assert_refused("m.pt2 not written differs PyTorch nan")
