"""Distillation: the loss of timm's task, tokens, runs with a teacher, teachers that do not fit."""

import json

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.task import LogitDistillationTask

import moh_vision
from moh_vision.classification import train as train_cls
from moh_vision.classification.config import ClsDistillConfig, ClsOptimConfig
from moh_vision.classification.task import ClassificationTask, TokenAlignment
from moh_vision.engine.optimizers import make_optimizer
from moh_vision.models.teachers import Teacher, WithProjector
from tests.support.pictures import write_folder
from tests.support.processes import on_two_ranks
from tests.support.refusals import assert_says, refuse, refused
from tests.support.small_runs import arguments, logged, outcome, results, whole_and_resumed

VIT = dict(img_size=8, patch_size=2, embed_dim=24, depth=2, num_heads=3)


def saved(folder, mean, std, names=None, seed=1, **sizes):
    """A teacher as timm saves it, which leans to class 3."""
    torch.manual_seed(seed)
    model = timm.create_model("vit_tiny_patch16_224", **{**VIT, **sizes})
    with torch.no_grad():
        model.head.weight.normal_(std=0.3)
        model.head.bias[min(3, model.num_classes - 1)] = 4
    model.pretrained_cfg.update(mean=mean, std=std)
    timm.models.save_for_hf(
        model, folder, model_config=dict(label_names=names), model_args={**VIT, **sizes}
    )
    return f"local-dir:{folder}"


@pytest.fixture(scope="module")
def grey(tmp_path_factory):
    return saved(
        tmp_path_factory.mktemp("t"), [0.2, 0.3, 0.4], [0.6, 0.7, 0.8], in_chans=1, num_classes=10
    )


def test_the_loss_and_its_gradient_are_timms(tmp_path):
    source = saved(tmp_path / "t", [0.2, 0.3, 0.4], [0.6, 0.7, 0.8], num_classes=5)
    torch.manual_seed(0)
    sizes = dict(VIT, num_heads=4, head_budget=[(1, 2)] * 2)
    student = timm.create_model("moh_vit_tiny_patch16_224", **sizes, num_classes=5)
    images = torch.rand(6, 3, 8, 8)
    labels = torch.arange(6) % 5
    teacher = Teacher(
        "distill.teacher", source, student.pretrained_cfg["mean"], student.pretrained_cfg["std"]
    )
    weights = dict(task_loss_weight=0.3, distill_loss_weight=2.0, temperature=4.0)
    timms = LogitDistillationTask(
        student,
        timm.create_model(source, pretrained=True),
        torch.nn.CrossEntropyLoss(),
        verbose=False,
        **weights,
    ).train()
    theirs = timms(images, labels)
    task = ClassificationTask(student, 0.0, distill=ClsDistillConfig("t", **weights))
    ours = task(images, labels, teacher(images))
    assert ours["kd_loss"] > 0.1 and len(ours["head_runs"]) == 2
    for name, of in (("kd_loss", "kd_loss"), ("task_loss", "loss"), ("loss", "loss")):
        torch.testing.assert_close(ours[name], theirs[of])
    gradients = []
    for losses in (ours, theirs):
        student.zero_grad()
        losses["loss"].backward()
        gradients.append(
            {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
        )
    routers = {name: value for name, value in gradients[0].items() if ".router." in name}
    assert routers and all(value.any() for value in routers.values())
    torch.testing.assert_close(*gradients)
    assert not any(p.requires_grad for p in teacher.parameters())


def test_a_run_learns_what_the_teacher_says_and_goes_on_to_the_bit(grey, tmp_path):
    """Without labels the student leans to the class that its teacher leans to."""
    learn = f"--distill.teacher {grey} --distill.task_loss_weight 0 --distill.temperature 2 --mix.cutmix 1 --optim.warmup_steps 0 --optim.schedule constant".split()
    whole, _ = whole_and_resumed("cls", tmp_path, [5, 9], *learn)
    lines = logged(whole)
    assert [top1 == 100 for _, top1 in results(whole)["top1_by_class"]] == [
        c == 3 for c in range(10)
    ]
    assert lines[-1]["kd_loss"] < 0.8 * lines[0]["kd_loss"] and all(
        len(line["head_usage"]) == 2 for line in lines
    )
    assert all(line["task_loss"] == pytest.approx(line["kd_loss"], abs=1e-5) for line in lines)
    assert not list(whole.glob("checkpoints/step_9/beside.safetensors"))


def test_a_teacher_that_changed_between_two_starts_is_refused(tmp_path, capsys):
    """By its weights: written anew with the same ones it is the same teacher."""
    means = [0.2, 0.3, 0.4], [0.6, 0.7, 0.8]
    sizes = dict(in_chans=1, num_classes=10)
    teacher = saved(tmp_path / "t", *means, **sizes)
    run = tmp_path / "run"

    def argv(steps):
        return arguments("cls", run, steps, 1, "--distill.teacher", teacher)

    train_cls.main(argv(1))
    saved(tmp_path / "t", *means, **sizes)
    train_cls.main(argv(2))
    saved(tmp_path / "t", *means, **sizes, seed=2)
    said = refused(capsys, train_cls.main, *argv(3))
    assert_says(said, f"distill.teacher {teacher} weights {run} sha256 frozen.json --allow-change")
    train_cls.main([*argv(3), "--allow-change", "distill.teacher"])
    assert_says(capsys.readouterr().out, f"distill.teacher {teacher} weights {run}")
    train_cls.main(argv(4))  # the new one is the run's now
    (run / "frozen.json").write_text("[1]")
    said = refused(capsys, train_cls.main, *argv(5))
    assert_says(said, f"{run}/frozen.json record --fresh")


def test_teachers_that_do_not_fit(grey, tmp_path, capsys):
    def error(*argv, root="digits"):
        run = arguments("cls", tmp_path / "run", 1, 1, "--data.root", root, *argv)
        return refused(capsys, train_cls.main, *run)

    said = error("--distill.teacher", grey, "--data.img_size", 12)
    assert_says(said, f"distill.teacher {grey} images [1, 12, 12] (8)")
    folder = write_folder(tmp_path / "d", size=(8, 8))
    colours = saved(tmp_path / "t", [0.5] * 3, [0.5] * 3, num_classes=5)
    said = error("--distill.teacher", colours, "--data.img_size", 8, root=folder)
    assert_says(said, f"distill.teacher {colours} 5 classes data 2")
    train_cls.main(arguments("cls", tmp_path / "digits", 1, 1))
    teacher = Teacher(
        "distill.teacher", str(tmp_path / "digits"), [0.5], [0.5]
    )  # a run is one, too
    assert teacher(torch.zeros(1, 1, 8, 8)).shape == (1, 10) == (1, len(teacher.classes))
    said = error("--distill.teacher", tmp_path / "digits", "--data.img_size", 8, root=folder)
    facts = f"data.root {folder} 10 classes distill.teacher {tmp_path}/digits 2 val 0"
    assert_says(said, facts)
    assert said.rstrip().endswith(str(tmp_path / "digits"))  # the class is only there
    other = saved(tmp_path / "other", [0.5] * 3, [0.5] * 3, ["dog", "cow"], num_classes=2)
    said = error("--distill.teacher", other, "--data.img_size", 8, root=folder)
    assert_says(said, f"data.root {folder} distill.teacher {other} 2 val cat")
    assert said.rstrip().endswith(" val")
    said = error("--distill.teacher", "vit_tniy")
    assert_says(said, "distill.teacher vit_tniy davit_tiny")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["timm", "run"])
def test_a_teacher_of_colours_sees_a_grey_image_as_three_equal_channels(kind, tmp_path):
    """Its logits and its tokens are those of the same grey images stored in colour."""
    if kind == "timm":
        teacher = saved(tmp_path / "t", [0.485, 0.456, 0.406], [0.229, 0.224, 0.225], num_classes=5)
    else:
        folder = write_folder(tmp_path / "d", size=(8, 8))
        teacher = str(tmp_path / "run")
        argv = ["--data.root", folder, "--data.img_size", 8]
        train_cls.main(arguments("cls", tmp_path / "run", 1, 1, *argv))
    grey = torch.rand(4, 1, 8, 8)
    of_grey = Teacher("distill.teacher", teacher, [0.4], [0.3])
    of_colours = Teacher("distill.teacher", teacher, [0.5, 0.4, 0.3], [0.2, 0.3, 0.4])
    colours = (grey.expand(-1, 3, -1, -1) - of_colours.mean) / of_colours.std
    grey = (grey - 0.4) / 0.3
    torch.testing.assert_close(of_grey(grey), of_colours(colours))
    for network in (of_grey, of_colours):
        network.match_grid(4)
    torch.testing.assert_close(of_grey.tokens(grey), of_colours.tokens(colours))
    assert of_grey.sha256 == of_colours.sha256
    of_grey.check_logits((1, 8, 8), len(of_grey.classes or range(5)))


def test_a_teacher_of_grey_images_takes_no_colours(grey):
    teacher = Teacher("distill.teacher", grey, [0.5] * 3, [0.5] * 3)
    refuse(f"distill.teacher {grey} images [3, 8, 8] 1", teacher.check_logits, (3, 8, 8), 10)


# ---------------------------------------------------------------- tokens of the last layer


def transnext(**sizes):
    """A TransNeXt of four narrow stages, whose last one has 2 x 2 patches of 64 pixels."""
    narrow = dict(embed_dims=[8, 16, 16, 32], num_heads=[2, 4, 4, 8], depths=[1, 1, 1, 1])
    name = "moh_transnext_small_75"
    return timm.create_model(name, img_size=64, head_budget="uniform:0.5", **narrow, **sizes)


def eva(**sizes):
    """A ViT with rotary positions and registers, converted."""
    name = "vit_small_patch16_dinov3"
    narrow = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)
    return moh_vision.convert(timm.create_model(name, **narrow, **sizes), head_budget=0.75)


MODELS = {
    "ViT": lambda **sizes: timm.create_model("moh_vit_tiny_patch16_224", **VIT, **sizes),
    "pooled ViT": lambda **sizes: timm.create_model(
        "moh_vit_tiny_patch16_224", **VIT, global_pool="avg", **sizes
    ),
    "Eva": eva,
    "TransNeXt": transnext,
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_tokens_are_those_that_a_teacher_gives(kind):
    """Patches alone, after the final norm; and the same logits as without."""
    torch.manual_seed(0)
    model = MODELS[kind](num_classes=5).eval()
    side = 64 if kind == "TransNeXt" else dict(Eva=32).get(kind, 8)
    images = torch.rand(2, 3, side, side)
    tokens = []
    logits, _ = model.forward_routed(images, tokens=tokens)
    features = model.forward_intermediates(images, indices=1, norm=True, intermediates_only=True)
    assert len(tokens) == 1
    torch.testing.assert_close(tokens[0], features[0].flatten(2).transpose(1, 2))
    torch.testing.assert_close(logits, model(images))


@pytest.mark.parametrize("width", [24, 36])
def test_the_loss_of_tokens_is_that_of_the_equation(width):
    torch.manual_seed(0)
    student = timm.create_model("moh_vit_tiny_patch16_224", **VIT, num_classes=5)
    images, labels = torch.rand(6, 3, 8, 8), torch.arange(6) % 5
    logits, taught = torch.randn(6, 5), torch.randn(6, 16, width)
    distill = ClsDistillConfig("t", 0.3, 2.0, 4.0, token_loss_weight=0.7)
    alignment = TokenAlignment(0.7, 24, width)
    assert len(list(alignment.parameters())) == (0 if width == 24 else 2)
    task = ClassificationTask(student, 0.0, distill=distill, alignment=alignment)
    without = task(images, labels, logits)
    losses = task(images, labels, logits, taught)
    tokens = []
    student.forward_routed(images, tokens=tokens)
    pairs = zip(alignment.projector(tokens[0]).flatten(0, 1), taught.flatten(0, 1), strict=True)
    cosines = [(p @ t / p.norm() / t.norm()).item() for p, t in pairs]
    assert losses["token_loss"].item() == pytest.approx(1 - sum(cosines) / 96, abs=1e-5)
    added = (losses["loss"] - without["loss"]).item()
    assert added == pytest.approx(0.7 * losses["token_loss"].item(), abs=1e-5)
    alone = task(images, labels, None, taught)
    cross_entropy = torch.nn.functional.cross_entropy(student(images), labels)
    expected = 0.3 * cross_entropy + 0.7 * losses["token_loss"]
    torch.testing.assert_close(alone["loss"], expected)
    assert "kd_loss" not in alone
    losses["loss"].backward()
    # DDP waits for the gradients of all.
    assert all(p.grad is not None for p in task.parameters() if p.requires_grad)


def test_the_projector_learns_as_the_models_last_layer_does():
    """Weight decay and layer decay are those of the model alone; a projector is no layer below its last one."""
    model = timm.create_model("moh_vit_tiny_patch16_224", **VIT, num_classes=5)
    both = WithProjector(model, TokenAlignment(1.0, 24, 36))
    optim = ClsOptimConfig(lr=1.0, weight_decay=0.1, layer_decay=0.5)

    def settings(optimizer, names):
        found = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                found[names[p]] = (group["lr"] * group["lr_scale"], group["weight_decay"])
        return found

    names = {p: name for name, p in model.named_parameters()}
    alone = settings(make_optimizer(model, optim), names)
    names |= {p: name for name, p in both.projector.named_parameters()}
    together = settings(make_optimizer(both, optim), names)
    assert together.items() >= alone.items() and alone["pos_embed"] == (0.125, 0.0)
    assert {name: together[name] for name in together.keys() - alone.keys()} == {
        "projector.weight": (1.0, 0.1),
        "projector.bias": (1.0, 0.0),
    }


@pytest.mark.parametrize("width", [32, 36])
def test_a_run_learns_a_teachers_tokens_and_goes_on_to_the_bit(width, tmp_path):
    """Its projector stands in checkpoints alone, and only where the widths differ."""
    sizes = dict(in_chans=1, num_classes=10, embed_dim=width, num_heads=4)
    means = [0.2, 0.3, 0.4], [0.6, 0.7, 0.8]
    teacher = saved(tmp_path / "t", *means, **sizes)
    learn = f"--distill.teacher {teacher} --distill.token_loss_weight 1 --distill.task_loss_weight 0".split()
    learn += "--optim.warmup_steps 0 --optim.schedule constant --balance_weight 0".split()
    whole, resumed = whole_and_resumed("cls", tmp_path, [5, 9], *learn)
    lines = logged(whole)
    plain = tmp_path / "plain"
    train_cls.main(arguments("cls", plain, 1, 1))
    assert 0 < lines[-1]["token_loss"] < 0.9 * lines[0]["token_loss"]
    for line in lines:
        assert line["loss"] == pytest.approx(line["kd_loss"] + line["token_loss"], abs=1e-5)
    for weights in ("model", "ema"):
        tensors = load_file(whole / f"{weights}.safetensors").keys()
        assert tensors == load_file(plain / "model.safetensors").keys()
    files = list(resumed.glob("checkpoints/step_*/beside.safetensors"))
    if width == 32:
        assert not files
        return
    states = [load_file(file) for file in sorted(files)]
    assert states[0].keys() == {f"alignment.projector.{part}" for part in ("weight", "bias")}
    assert not any(torch.equal(states[0][name], states[1][name]) for name in states[0])


def on_a_rank(rank, folder, teacher):
    argv = ["--distill.teacher", teacher, "--distill.token_loss_weight", "1"]
    train_cls.main(arguments("cls", folder / "two", 3, 3, *argv))


@pytest.mark.slow
def test_two_processes_see_the_loss_of_one(tmp_path):
    """With a projector, whose gradient they average too."""
    sizes = dict(in_chans=1, num_classes=10, embed_dim=36)
    teacher = saved(tmp_path / "t", [0.2, 0.3, 0.4], [0.6, 0.7, 0.8], **sizes)
    on_two_ranks(on_a_rank, tmp_path, teacher)
    argv = ["--distill.teacher", teacher, "--distill.token_loss_weight", "1"]
    train_cls.main(arguments("cls", tmp_path / "one", 3, 3, *argv))
    for line, other in zip(logged(tmp_path / "one"), logged(tmp_path / "two"), strict=True):
        for key in ("loss", "kd_loss", "token_loss"):
            assert line[key] > 0
            assert other[key] == pytest.approx(line[key], rel=1e-3)


def test_the_source_of_a_run_is_its_teacher(tmp_path, run_command):
    """A run, what was published of it, a folder of timm: a conversion with all heads says what it does, from the first step."""
    dense = tmp_path / "dense"
    train_cls.main(arguments("cls", dense, 3, 3, "--model.router", "dense"))
    assert run_command("publish", dense, "--output", tmp_path / "published").code == 0
    saved(tmp_path / "timm", [0.5] * 3, [0.5] * 3, in_chans=1, num_classes=10)
    for source in (dense, tmp_path / "published", tmp_path / "timm"):
        run = tmp_path / f"of_{source.name}"
        argv = "--data.root digits --data.workers 0 --optim.batch_size 8 --max-steps 1 --log-every 1 --calibrate-images 8"
        argv += " --model.name pretrained --model.convert.router moh --model.head_budget uniform:1 --optim.lr 1e-4"
        argv += f" --model.pretrained {source} --distill.teacher source --distill.token_loss_weight 1 --output {run}"
        train_cls.main(argv.split())
        (line,) = logged(run)
        assert line["kd_loss"] == pytest.approx(0, abs=1e-5)
        assert line["token_loss"] == pytest.approx(0, abs=1e-5)
        assert json.loads((run / "frozen.json").read_text()).keys() == {"distill.teacher"}


def test_a_teacher_of_other_classes_gives_its_tokens(tmp_path, capsys):
    """Where its logits do not count."""
    teacher = saved(tmp_path / "t", [0.5] * 3, [0.5] * 3, num_classes=5)
    argv = f"--distill.teacher {teacher} --distill.token_loss_weight 1 --distill.distill_loss_weight".split()
    said = refused(capsys, train_cls.main, *arguments("cls", tmp_path / "run", 1, 1, *argv, "1"))
    assert_says(said, f"distill.teacher {teacher} 5 classes 10")
    train_cls.main(arguments("cls", tmp_path / "run", 1, 1, *argv, "0"))
    (line,) = logged(tmp_path / "run")
    assert line["token_loss"] > 0 and "kd_loss" not in line


# Options -> facts of the refusal; {0}: a teacher of 16 patches, {1}: one of 4.
REFUSED_TOKENS = {
    "--distill.token_loss_weight 1": "distill.token_loss_weight distill.teacher",
    "--distill.teacher source": "distill.teacher source model.pretrained init_from",
    "--distill.teacher {0} --distill.distill_loss_weight 0": "distill.teacher {0} distill.distill_loss_weight 0 distill.token_loss_weight 0",
    "--distill.teacher {0} --distill.token_loss_weight 1 --distill.distill_loss_weight 0 --distill.temperature 2": "distill.temperature distill.distill_loss_weight",
    "--distill.teacher {1} --distill.token_loss_weight 1": "distill.teacher {1} 4 tokens 16",
    "--distill.teacher {0} --distill.token_loss_weight 1 --model.kwargs.patch_drop_rate 0.5": "distill.token_loss_weight patch_drop_rate 0.5",
}


@pytest.mark.parametrize("options", REFUSED_TOKENS)
def test_tokens_that_cannot_be_learnt_are_refused(options, grey, tmp_path, capsys):
    coarse = saved(tmp_path / "t", [0.5] * 3, [0.5] * 3, in_chans=1, num_classes=10, patch_size=4)
    argv = arguments("cls", tmp_path / "run", 1, 1, *options.format(grey, coarse).split())
    said = refused(capsys, train_cls.main, *argv)
    assert_says(said, REFUSED_TOKENS[options].format(grey, coarse))
    assert not (tmp_path / "run").exists()


def test_steps_as_graphs_learn_the_same(tmp_path, eager_graphs):
    """The teacher is called before a graph is replayed, which gets what it says as it gets the images."""
    teacher = saved(tmp_path / "t", [0.5] * 3, [0.5] * 3, in_chans=1, num_classes=10)
    made = eager_graphs()
    for name, more in (("eager", ()), ("graph", ("--cuda_graph", "on"))):
        argv = ["--distill.teacher", teacher, "--distill.token_loss_weight", "1", *more]
        train_cls.main(arguments("cls", tmp_path / name, 6, 100, *argv))
    assert made[-1].replays > 0
    assert outcome(tmp_path / "eager") == outcome(tmp_path / "graph")
