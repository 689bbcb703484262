import shlex
from operator import attrgetter

import pytest
import yaml

from moh_vision.attention import head_budget
from moh_vision.classification.config import ClsConfig, ValidateConfig
from moh_vision.diffusion.config import DitConfig, SampleConfig
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.keys import changed_keys
from moh_vision.language.config import LanguageConfig
from moh_vision.models.weights import create
from tests.support.paths import ROOT
from tests.support.refusals import one_line, refuse

KINDS = dict(cls=ClsConfig, dit=DitConfig, sample=SampleConfig)
DRAW = "--checkpoint run --grid g.png"


def parse(*argv, kind=ClsConfig):
    return parse_config(kind, list(argv), "test")


def written(tmp_path, kind, text, argv):
    """Parse a file with such a text, if any, and options."""
    (tmp_path / "c.yaml").write_text(text)
    return parse(
        *["--config", str(tmp_path / "c.yaml")] * bool(text), *shlex.split(argv), kind=KINDS[kind]
    )


@pytest.mark.parametrize("kind, text, argv, values", [
    ("cls", "max_steps: 7\nmodel: {head_budget: 'ramp:0.5', depth: 2}", "--model.depth 3 --optim.lr=1e-4",
     {"max_steps": 7, "model.head_budget": "ramp:0.5", "model.depth": 3, "optim.lr": 1e-4, "fresh": False, "allow_change": []}),
    ("cls", "", "--model.head_budget 0.5", {"model.head_budget": 0.5}),
    ("cls", "", "--model.head_budget uniform:0.5", {"model.head_budget": "uniform:0.5"}),
    ("cls", "", "--model.head_budget [[1,2],[2,3]]", {"model.head_budget": [(1, 2), (2, 3)]}),
    ("cls", "", "--max-steps 3 --dry-run --fresh --allow-change optim.lr --model.head-budget=0.5",
     {"max_steps": 3, "dry_run": True, "fresh": True, "allow_change": ["optim.lr"], "model.head_budget": 0.5}),
    ("cls", "", "--model.kwargs '{global_pool: avg}' --model.router_kwargs.two_stage false",
     {"model.kwargs": {"global_pool": "avg"}, "model.router_kwargs": {"two_stage": False}}),
    ("cls", "", "--compile --channels-last --seed 3", {"compile": True, "channels_last": True, "seed": 3}),
    ("cls", "", "--compile false", {"compile": False}),
    ("cls", "", "--ema.decay 0.9 --ema.warmup --optim.betas 0.8 0.95 --seed 3",
     {"ema.warmup": True, "optim.betas": (0.8, 0.95), "seed": 3}),
    ("sample", "", f"{DRAW} --cfg-scale 1.5 --classes 207 n02099601 007", {"cfg_scale": 1.5, "classes": ["207", "n02099601", "007"]}),
    ("sample", "", f"{DRAW} --classes 7", {"classes": ["7"]}),
    ("sample", "", f"""{DRAW} '--classes=["3",a]'""", {"classes": ["3", "a"]}),
    ("dit", "", "--preview.every 1 --preview.classes 207 n02099601 007", {"preview.classes": ["207", "n02099601", "007"]}),
])  # fmt: skip
def test_options(tmp_path, kind, text, argv, values):
    config = written(tmp_path, kind, text, argv)
    assert {name: attrgetter(name)(config) for name in values} == values


@pytest.mark.parametrize("kind, text, argv, words", [
    ("cls", "", "--optim.learning-rate 1", "unknown key 'optim.learning_rate', did you mean 'optim.lr'"),
    ("cls", "", "--name x", "unknown key 'name', did you mean 'model.name'"),
    ("cls", "", "--zebra 1", "unknown key 'zebra'; --help lists the known ones"),
    ("cls", "", "--seed many", 'key "seed": Expected int. Got value: many'),
    ("cls", "", "--model 5", "is a section of keys"),
    ("cls", "", "--model '{dpeth: 3}'", "unknown key 'model.dpeth', did you mean 'model.depth'"),
    ("sample", "", "--steps 5", "--checkpoint is needed"),
    ("cls", "", "--config text/wt103", "train_text.py takes this file; .*wt103.yaml: unknown key"),
    ("cls", "", "--config /no/where.yaml", "--config /no/where.yaml: no such file"),
    ("cls", "", "--config cls/cifar10_vit", "--config cls/cifar10_vit: no such file, did you mean cls/cifar10_vit_cpu"),
    ("cls", "", "--allow-change optim.lrr", "--allow-change optim.lrr: unknown key 'optim.lrr', did you mean 'optim.lr'"),
    ("cls", "", "--allow-change optim.name", "--allow-change optim.name: a checkpoint keeps the state of its own optimiser"),
    ("cls", "", "--optim.warmup_epochs 1 --optim.warmup_steps 1", "are the same thing: give one"),
    # keys without effect
    ("cls", "", "--data.auto_augment rand-m9", "data.auto_augment 'rand-m9' needs data.augment imagenet"),
    ("cls", "", "--data.crop_scale 0.08 1", r"data.crop_scale \(0.08, 1.0\) needs data.augment imagenet"),  # the default, too
    ("cls", "optim: {schedule: constant, min_lr: 0.0001}", "--seed 1", "--config .*c.yaml: optim.min_lr 0.0001 needs"),
    ("cls", "optim: {min_lr: 0.0001}", "--optim.schedule constant --optim.min_lr 0.0002", "^optim.min_lr 0.0002 needs"),
    ("cls", "model: {router: dense}", "--model.head_budget 0.5", "^model.head_budget 0.5 needs a model that routes its heads"),
    # of files
    ("cls", "model: {dept: 3}", "", "c.yaml: unknown key 'model.dept', did you mean 'model.depth'"),
    ("cls", "hello", "", "c.yaml: expected keys and values, found str"),
    ("cls", "a: &a [x, x]\nmodel: {kwargs: {b: [*a, *a]}}", "", "c.yaml: .*an alias, \\*a; write the value out"),
    ("cls", "# " + "x" * 2**21, "", "c.yaml: .*a configuration has at most 1048576"),
    ("cls", "optim: 3", "", 'c.yaml: key "optim" is a section of keys, got 3'),
    ("cls", "fresh: true", "", "c.yaml: fresh is an option of one call, which no file holds: --fresh"),
    ("cls", "base: nowhere", "", "c.yaml: base nowhere: no such file"),
    ("cls", "base: c.yaml", "", "c.yaml: base 'c.yaml': expected a file, and at most 20 of them upon each other"),
    ("cls", "base: b.yaml", "", "b.yaml: unknown key 'modle', did you mean 'model'"),
    # written twice: YAML forbids it, and PyYAML keeps the last alone
    ("cls", "model: {depth: 2}\noptim: {lr: 1.0}\nmodel: {num_heads: 3}", "", "c.yaml: line 3: 'model' is on line 1 already; keep one"),
    ("cls", "optim:\n  lr: 1.0\n  eps: 1.0\n  lr: 2.0", "", "c.yaml: line 4: 'lr' is on line 2 already"),
    ("cls", "model: {kwargs: {a: 1, a: 2}}", "", "c.yaml: line 1: 'a' is in it twice"),
    ("cls", "model.depth: 3\nmodel: {depth: 2}", "", "c.yaml: model.depth is there twice"),
    ("cls", "", "--model '{depth: 3, depth: 2}'", "--model: line 1: 'depth' is in it twice"),
    ("cls", "", "--model.kwargs '{a: 1, a: 2}'", "--model.kwargs: line 1: 'a' is in it twice"),
    ("cls", "seed: many", "--log-every 3", 'c.yaml: key "seed": Expected int. Got value: many'),
])  # fmt: skip
def test_mistakes_are_one_line(tmp_path, kind, text, argv, words):
    (tmp_path / "b.yaml").write_text("modle: 1")
    refuse(words, written, tmp_path, kind, text, argv)


@pytest.mark.parametrize(
    "text",
    [f"model: {{kwargs: {{a: {'[' * 3000 + ']' * 3000}}}}}", f"seed: {'9' * 9999}", "\x00\x01\x02", "max_steps: [1",
     "seed: !!python/name:os.system", "seed: 1\n---\nseed: 2\n", "model:\n\tdepth: 1\n", b"output: \xe9"],
    ids=["deep nesting", "a long number", "bytes", "an open list", "a tag", "two documents", "tabs", "Latin 1"],
)  # fmt: skip
def test_files_that_are_no_yaml(tmp_path, text):
    file = tmp_path / "c.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with one_line(f"{file}: not readable as YAML") as error:
        parse("--config", str(file))
    assert len(str(error.value)) < 2000


def test_texts_are_only_texts():
    """Nothing is expanded, run or followed."""
    for text in ("$(touch x)", "`touch x` ~", "../../${HOME}", "%s%n \u202e", "x" * 100_000):
        assert parse(f"--output={text}").output == text


def test_arguments_that_the_data_decide():
    model = parse("--model.kwargs", "{num_classes: 5, drop_rate: 0.1}").model
    assert model.decided(num_classes=5, in_chans=1) == dict(num_classes=5, in_chans=1)
    refuse(
        "model.kwargs.num_classes 5 has no effect: the data and other keys make it 10",
        model.decided,
        num_classes=10,
    )


def test_changed_keys():
    old = parse("--max-steps", "5", "--optim.lr", "0.1").tree()
    new = parse(
        "--max-steps",
        "9",
        "--optim.lr",
        "0.2",
        "--data.workers",
        "0",
        "--model.depth",
        "3",
        "--fresh",
    )
    assert changed_keys(old, new, []) == ["model.depth: None -> 3", "optim.lr: 0.1 -> 0.2"]
    assert changed_keys(old, new, ["model.depth", "optim.lr"]) == []
    assert changed_keys(yaml.safe_load(yaml.safe_dump(new.tree())), new, []) == []
    # What has no effect in the new run makes no difference: min_lr, of a schedule that is constant.
    falls = parse("--optim.min_lr", "1e-5").tree()
    assert changed_keys(falls, parse("--optim.schedule", "constant"), ["optim.schedule"]) == []


def test_a_saved_configuration_reads_back(tmp_path):
    assert not {"fresh", "dry_run", "allow_change"} & set(parse("--fresh").tree())
    config = parse("--model.head_budget", "[[1,2],[2,3]]", "--optim.betas", "[0.9, 0.95]")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.tree()))
    assert parse("--config", str(file)) == config


RUNS = [
    path for path in sorted((ROOT / "configs").rglob("*.yaml")) if path.parent.name != "accelerate"
]


@pytest.mark.parametrize("path", RUNS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_shipped_configs_are_valid(path):
    kind = DitConfig if "dit" in str(path.relative_to(ROOT)) else ClsConfig
    kind = LanguageConfig if path.parent.name == "text" else kind
    config = parse("--config", str(path), kind=kind)
    assert config.output == f"runs/{path.parent.name}/{path.stem}", (
        "a folder of its own, not that of its base"
    )
    assert path.read_text().startswith("#"), (
        "a header with command, hardware, hours and expected result"
    )


@pytest.mark.parametrize("name, options, billions", [
    ("moh_llm_small", "", 100), ("moh_llm_base", "", 100), ("moh_llm_base", "--max_steps 47684", 200),
    ("moh_llama3_stage1", "", 300), ("moh_llama3_stage2", "", 100),
])  # fmt: skip
def test_the_schedules_of_language_models(name, options, billions):
    """Jin 2024, tables B to D: as many tokens as the budget, shares of 100 %, a tenth of the rate or less at the end."""
    config = parse("--config", f"text/{name}", *options.split(), kind=LanguageConfig)
    o, d = config.optim, config.data
    tokens = o.batch_size * d.block
    assert tokens == (2**24 if d.block == 8192 else 2**22)
    assert 0 <= config.max_steps * tokens - billions * 10**9 < tokens
    assert (o.schedule, o.weight_decay, o.clip_norm, o.warmup_lr) == ("cosine", 0.1, 1.0, 1e-7)
    assert o.batch_size % (o.accumulation * 8) == 0
    if config.model.pretrained:
        stages = {300: (6e-5, 6e-6, 0.0, None), 100: (2e-5, 1e-6, 0.01, [[16, 8]] * 32)}
        budget = (config.model.convert or {}).get("head_budget")
        assert (o.lr, o.min_lr, config.balance_weight, budget) == stages[
            billions
        ] and o.warmup_steps == 50
    else:
        small = name.endswith("small")
        assert o.lr == (3e-4 if small else 5e-4) and o.min_lr == pytest.approx(o.lr / 10)
        assert o.warmup_steps == (2000 if small else 500) and config.balance_weight == 0.01
        assert sum(source["weight"] for source in d.mixture) == pytest.approx(100)
        assert config.model.name == f"clm_moh_{'small' if small else 'base'}_75"


RECIPE = [f"moh_transnext_{kind}" for kind in ("small_80", "small_75", "base_75", "base_50")]
RECIPE += [f"moh_vit_{size}_patch16_224" for size in ("tiny", "small", "base", "large")]


@pytest.mark.parametrize("name", RECIPE)
def test_the_papers_recipe(name):
    """Jin 2024's released options; batch 1024 of 1,281,167 images are 1251.1 steps an epoch."""
    config = parse("--config", f"cls/{name}")
    o, d = config.optim, config.data
    assert (config.model.name, config.output) == (name, f"runs/cls/{name}")
    assert (o.lr, o.warmup_lr, o.min_lr, o.weight_decay, o.eps, o.clip_norm) == (
        1e-3,
        1e-6,
        1e-5,
        0.05,
        1e-8,
        1.0,
    )
    assert (o.batch_size, o.schedule, o.betas) == (1024, "cosine", (0.9, 0.999))
    assert config.steps(1_281_167) == (375342, 375342, 6256)
    assert (d.augment, d.repeats, d.auto_augment) == ("imagenet", 3, "rand-m9-mstd0.5-inc1")
    assert (d.erase_prob, d.erase_mode, d.crop_scale, d.img_size) == (
        0.25,
        "pixel",
        (0.08, 1.0),
        224,
    )
    assert (config.mix.mixup, config.mix.cutmix, config.mix.prob, config.mix.switch_prob) == (
        0.8,
        1.0,
        1.0,
        0.5,
    )
    assert (config.label_smoothing, config.balance_weight, config.ema.decay) == (0.1, 0.01, 0)
    if "transnext" in name:
        assert config.model.arguments()["drop_path_rate"] == (0.6 if "base" in name else 0.45)
        assert config.mixed_precision == "fp16"


def test_steps_from_epochs():
    def steps(*argv, images=1000):
        return parse("--optim.batch_size", "64", *argv).steps(images)

    assert steps() == (1000, 1000, 0)
    assert steps("--max-steps", "7", "--optim.warmup_steps", "3") == (7, 7, 3)
    assert steps("--optim.epochs", "300", "--optim.warmup_epochs", "5") == (4688, 4688, 78)
    assert steps("--optim.epochs", "300", "--optim.cooldown_epochs", "10") == (4844, 4688, 0)
    # a trial of the first steps: the schedule stays that of the epochs
    assert steps("--optim.epochs", "300", "--max-steps", "9") == (9, 4688, 0)
    assert steps("--max-steps", "320", "--optim.warmup_epochs", "2") == (320, 320, 31)


def test_configurations_are_found_by_name(tmp_path, monkeypatch):
    by_path = parse("--config", str(ROOT / "configs" / "cls" / "moh_vit_small_patch16_224.yaml"))
    monkeypatch.chdir(tmp_path)
    for name in ("cls/moh_vit_small_patch16_224", "configs/cls/moh_vit_small_patch16_224.yaml"):
        assert parse("--config", name) == parse(f"--config={name}") == by_path
    (tmp_path / "cls").mkdir()
    (tmp_path / "cls" / "moh_vit_small_patch16_224").write_text("seed: 5")  # a path comes first
    assert parse("--config", "cls/moh_vit_small_patch16_224").seed == 5


@pytest.mark.parametrize(
    "name, kind", [("ddp", "MULTI_GPU"), ("fsdp2", "FSDP"), ("fsdp2_layers", "FSDP")]
)
def test_accelerate_reads_the_launch_files(name, kind):
    from accelerate.commands.config.config_args import load_config_from_file

    launch = load_config_from_file(str(ROOT / "configs" / "accelerate" / f"{name}.yaml"))
    assert str(launch.distributed_type).endswith(kind) and launch.mixed_precision == "no"
    if kind == "FSDP":
        assert launch.fsdp_config["fsdp_version"] == 2
        policy = "TRANSFORMER_BASED_WRAP" if name == "fsdp2_layers" else "NO_WRAP"
        assert launch.fsdp_config["fsdp_auto_wrap_policy"] == policy


def test_what_an_option_makes_idle_is_left_out_of_the_file(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text("optim: {min_lr: 0.0001, lr: 0.1}\nmodel: {name: moh_vit, head_budget: 0.5}\n")
    config = parse("--config", str(file), "--optim.schedule", "constant", "--model.router", "dense")
    assert (config.optim.min_lr, config.optim.lr, config.model.head_budget) == (0, 0.1, None)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(
        f"test: left out of {file}, without effect here: "
    )
    needs = "(needs optim.schedule other than constant), model.head_budget 0.5 (needs a model"
    assert f"optim.min_lr 0.0001 {needs}" in said
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(config.tree())
    )  # what a run saves says nothing more
    assert parse("--config", str(tmp_path / "run.yaml")) == config and capsys.readouterr().err == ""


@pytest.mark.parametrize("config, baseline", [
    ("cls/cifar10_small_cpu", "--model.router dense"), ("quickstart/cls", "--model.router mae"),
    ("dit/cifar10_small_cpu", "--model.name dit_small_patch2"), ("quickstart/dit", "--model.name dit_small_patch2"),
])  # fmt: skip
def test_a_dense_baseline_has_all_heads(config, baseline):
    """The configurations with a budget, beside the documented option that makes a model without one of them."""
    kind = DitConfig if "dit" in config else ClsConfig
    model = parse("--config", config, *baseline.split(), kind=kind).model
    task = "diffusion" if kind is DitConfig else "classification"
    assert (
        head_budget(create(model.name, task, **dict(model.arguments(), img_size=32)))["share"] == 1
    )


DIT = [
    f"moh_dit_{size}_patch2_{share}"
    for size in ("small", "base", "large", "xlarge")
    for share in (90, 75)
]


@pytest.mark.parametrize("name", DIT)
def test_the_papers_diffusion_recipe(name):
    """DiT's (Peebles 2023, section 4) with MoH's balance weight, as released."""
    config = parse("--config", f"dit/{name}", kind=DitConfig)
    o = config.optim
    assert (config.model.name, config.output) == (name, f"runs/dit/{name}")
    assert (o.lr, o.schedule, o.weight_decay, o.betas) == (1e-4, "constant", 0.0, (0.9, 0.999))
    assert (o.batch_size, o.accumulation, o.clip_norm, o.warmup_steps) == (256, 1, 0.0, 0)
    assert (config.ema.decay, config.ema.warmup, config.label_drop, config.balance_weight) == (
        0.9999,
        False,
        0.1,
        0.01,
    )
    assert (config.learn_sigma, config.data.augment, config.tf32) == (True, "flip", True)
    assert config.max_steps == (2_000_000 if "xlarge" in name else 400_000)


def test_what_a_file_takes_from_its_base(tmp_path):
    (tmp_path / "sub").mkdir()
    first = "seed: 1\nmax_steps: 5\nmodel: {depth: 2, kwargs: {a: 1}}\nbase: quickstart/cls\n"
    (tmp_path / "first.yaml").write_text(first)
    (tmp_path / "sub" / "second.yaml").write_text(
        "base: ../first.yaml\nseed: 2\nmodel: {kwargs: {b: 1}}\n"
    )
    config = parse("--config", str(tmp_path / "sub" / "second.yaml"), "--max-steps", "7")
    assert (config.seed, config.max_steps, config.model.depth) == (2, 7, 2)
    assert config.model.kwargs == {"b": 1}  # a mapping is a value like any other
    assert config.model.embed_dim == parse("--config", "quickstart/cls").model.embed_dim
    assert "base" not in config.tree()


def test_options_win_over_files_wherever_they_stand(tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 1\nmodel: {kwargs: {a: 1, b: 1}}\nlog_every: 3\n")
    (tmp_path / "b.yaml").write_text("log_every: 4\n")
    files = ["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")]
    options = ["--seed", "7", "--model.kwargs.b", "2"]
    assert (
        parse(*options, *files)
        == parse(*files, *options)
        == parse(*files[:2], *options, *files[2:])
    )
    found = parse(*options, *files)
    assert (found.seed, found.log_every, found.model.kwargs) == (7, 4, {"a": 1, "b": 2})
    assert found.given == {"seed", "model.kwargs"}


def test_validation_has_keys_of_its_own(tmp_path, capsys):
    def validation(*argv):
        return parse(*argv, kind=ValidateConfig)

    with pytest.raises(
        SystemExit
    ):  # a run's configuration has more keys, which validation leaves out
        parse(
            "--data.root", "shards", "--data.augment", "imagenet", "--seed", "3", "--print_config"
        )
    (tmp_path / "config.yaml").write_text(capsys.readouterr().out)
    config = validation("--checkpoint", str(tmp_path), "--data.workers", "0")
    assert (config.data.root, config.data.augment, config.data.workers) == ("shards", "imagenet", 0)
    assert config.checkpoint == str(tmp_path) and not hasattr(config, "seed")
    (tmp_path / "own.yaml").write_text("max_steps: 3\ndata: {eval_batch_size: 7}\n")
    config = validation("--config", str(tmp_path / "own.yaml"), "--checkpoint", str(tmp_path))
    assert (config.data.root, config.data.eval_batch_size) == (None, 7)
    refuse("unknown key 'dry_run'", validation, "--checkpoint", "x", "--dry-run")
