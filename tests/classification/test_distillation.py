"""Distillation: the loss of timm's task, runs with a teacher, teachers that do not fit."""

import pytest
import timm
import torch
from timm.task import LogitDistillationTask

from moh_vision.classification import train as train_cls
from moh_vision.classification.config import DistillConfig
from moh_vision.classification.task import ClassificationTask
from moh_vision.models.teachers import Teacher
from tests.support.pictures import write_folder
from tests.support.refusals import assert_says, refuse, refused
from tests.support.small_runs import arguments, logged, results, whole_and_resumed

VIT = dict(img_size=8, patch_size=2, embed_dim=24, depth=2, num_heads=3)


def saved(folder, mean, std, names=None, seed=1, **sizes):
    """A teacher as timm saves it, which leans to class 3."""
    torch.manual_seed(seed)
    model = timm.create_model("vit_tiny_patch16_224", **VIT, **sizes)
    with torch.no_grad():
        model.head.weight.normal_(std=0.3)
        model.head.bias[min(3, model.num_classes - 1)] = 4
    model.pretrained_cfg.update(mean=mean, std=std)
    timm.models.save_for_hf(
        model, folder, model_config=dict(label_names=names), model_args=dict(VIT, **sizes)
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
    student = timm.create_model("moh_vit_tiny_patch16_224", **VIT, num_classes=5)
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
    task = ClassificationTask(student, 0.0, distill=DistillConfig("t", **weights))
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
