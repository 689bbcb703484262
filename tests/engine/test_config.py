"""Configurations: options and files, mistakes in them, and the values of those that ship with the package."""

import itertools
import shlex
from operator import attrgetter

import pytest
import timm
import yaml

from moh_vision.attention import head_budget
from moh_vision.classification.config import ClsConfig, ValidateConfig
from moh_vision.diffusion.config import DitConfig, SampleConfig
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.keys import changed_keys
from moh_vision.language.config import LanguageConfig
from moh_vision.models.creation import create
from moh_vision.models.prediction import PREDICTS
from tests.support.paths import ROOT
from tests.support.refusals import assert_says, one_line, refuse

CONFIG_CLASSES = dict(cls=ClsConfig, dit=DitConfig, sample=SampleConfig)
DRAW = "--checkpoint run --grid g.png"


def parse(*argv, config_class=ClsConfig):
    return parse_config(config_class, list(argv), "test")


def written(tmp_path, script, text, argv):
    """Parse the options `argv` of a script, with a configuration file of this text unless it is empty."""
    options = shlex.split(argv)
    (tmp_path / "c.yaml").write_text(text)
    if text:
        options = ["--config", str(tmp_path / "c.yaml"), *options]
    return parse(*options, config_class=CONFIG_CLASSES[script])


# Case -> (script, text of its configuration file, options, values of keys that result).
OPTIONS = {
    "options over a file": ("cls", "max_steps: 7\nmodel: {head_budget: 'ramp:0.5', depth: 2}", "--model.depth 3 --optim.lr=1e-4",
     {"max_steps": 7, "model.head_budget": "ramp:0.5", "model.depth": 3, "optim.lr": 1e-4, "fresh": False, "allow_change": []}),
    "budget: a share": ("cls", "", "--model.head_budget 0.5", {"model.head_budget": 0.5}),
    "budget: shape and share": ("cls", "", "--model.head_budget uniform:0.5", {"model.head_budget": "uniform:0.5"}),
    "budget: pairs": ("cls", "", "--model.head_budget [[1,2],[2,3]]", {"model.head_budget": [(1, 2), (2, 3)]}),
    "budget of groups": ("cls", "", "--model.mlp_budget [[1,2],[2,3]] --model.mlp_groups 4", {"model.mlp_budget": [(1, 2), (2, 3)], "model.mlp_groups": 4}),
    "groups alone": ("dit", "", "--model.name dit_small_patch2 --model.scope sample --model.mlp_budget 0.5 --balance_weight 0.1 --budget_range 0.5 1.0",
     {"model.scope": "sample", "model.mlp_budget": 0.5, "balance_weight": 0.1, "budget_range": (0.5, 1.0)}),
    "converted groups alone": ("cls", "", "--model.name pretrained --model.pretrained x --model.convert '{router: dense, scope: sample, mlp_budget: 0.5}' --balance_weight 0.1",
     {"balance_weight": 0.1}),
    "dashes and flags": ("cls", "", "--max-steps 3 --dry-run --fresh --allow-change optim.lr --model.head-budget=0.5",
     {"max_steps": 3, "dry_run": True, "fresh": True, "allow_change": ["optim.lr"], "model.head_budget": 0.5}),
    "dicts": ("cls", "", "--model.kwargs '{global_pool: avg}' --model.router_kwargs.two_stage false",
     {"model.kwargs": {"global_pool": "avg"}, "model.router_kwargs": {"two_stage": False}}),
    "flags without a value": ("cls", "", "--compile --channels-last --seed 3", {"compile": True, "channels_last": True, "seed": 3}),
    "a flag that is false": ("cls", "", "--compile false", {"compile": False}),
    "a flag with another form": ("cls", "", "--compile blocks", {"compile": "blocks"}),
    "several values": ("cls", "", "--ema.decay 0.9 --ema.warmup --optim.betas 0.8 0.95 --seed 3",
     {"ema.warmup": True, "optim.betas": (0.8, 0.95), "seed": 3}),
    "classes stay text": ("sample", "", f"{DRAW} --cfg-scale 1.5 --classes 207 n02099601 007", {"cfg_scale": 1.5, "classes": ["207", "n02099601", "007"]}),
    "a list of one": ("sample", "", f"{DRAW} --classes 7", {"classes": ["7"]}),
    "a list in brackets": ("sample", "", f"""{DRAW} '--classes=["3",a]'""", {"classes": ["3", "a"]}),
    "classes of a section": ("dit", "", "--preview.every 1 --preview.classes 207 n02099601 007", {"preview.classes": ["207", "n02099601", "007"]}),
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS)
def test_options(tmp_path, case):
    script, text, argv, values = OPTIONS[case]
    config = written(tmp_path, script, text, argv)
    assert {name: attrgetter(name)(config) for name in values} == values


@pytest.mark.parametrize("script, text, argv, facts", [
    ("cls", "", "--optim.learning-rate 1", "optim.learning_rate optim.lr"),
    ("cls", "", "--name x", "'name' 'model.name'"),
    ("cls", "", "--zebra 1", "zebra --help"),
    ("cls", "", "--seed many", "seed int many"),
    ("cls", "", "--model 5", "model section 5"),
    ("cls", "", "--model '{dpeth: 3}'", "model.dpeth model.depth"),
    ("sample", "", "--steps 5", "--checkpoint needed"),
    ("cls", "", "--config text/wt103", "wt103.yaml train_text.py"),
    ("cls", "", "--config /no/where.yaml", "--config /no/where.yaml"),
    ("cls", "", "--config cls/cifar10_vit", "--config cls/cifar10_vit cls/cifar10_vit_cpu"),
    ("cls", "", "--allow-change optim.lrr", "--allow-change optim.lrr optim.lr"),
    ("cls", "", "--allow-change optim.name", "--allow-change optim.name optimiser"),
    ("cls", "", "--optim.warmup_epochs 1 --optim.warmup_steps 1", "optim.warmup_epochs optim.warmup_steps"),
    # Keys without effect.
    ("cls", "", "--data.auto_augment rand-m9", "data.auto_augment 'rand-m9' data.augment imagenet"),
    ("cls", "", "--data.crop_scale 0.08 1", "data.crop_scale 0.08 1.0 data.augment imagenet"),  # although it is the default
    ("cls", "optim: {schedule: constant, min_lr: 0.0001}", "--seed 1", "c.yaml optim.min_lr 0.0001 optim.schedule constant"),
    ("cls", "optim: {min_lr: 0.0001}", "--optim.schedule constant --optim.min_lr 0.0002", "optim.min_lr 0.0002 optim.schedule constant"),
    ("cls", "model: {router: dense}", "--model.head_budget 0.5", "model.head_budget 0.5 routes"),
    ("cls", "", "--model.mlp_groups 4", "model.mlp_groups 4 model.mlp_budget"),
    ("cls", "", "--model.name pretrained --model.pretrained x --model.mlp_budget 0.5 --model.mlp_groups 4", "model.mlp_groups 4 model.pretrained"),
    ("cls", "", "--model.router dense --model.scope sample", "model.scope 'sample' routes"),
    ("cls", "", "--model.router dense --model.mlp_budget 0.5 --model.head_budget 0.5", "model.head_budget 0.5 routes"),
    ("dit", "", "--model.name dit_small_patch2 --balance_weight 0.1", "balance_weight 0.1 router moh query_norm model.mlp_budget"),
    # Mistakes in files.
    ("cls", "model: {dept: 3}", "", "c.yaml model.dept model.depth"),
    ("cls", "hello", "", "c.yaml keys str"),
    ("cls", "a: &a [x, x]\nmodel: {kwargs: {b: [*a, *a]}}", "", "c.yaml alias *a"),
    ("cls", "# " + "x" * 2**21, "", "c.yaml 1048576"),
    ("cls", "optim: 3", "", "c.yaml optim section 3"),
    ("cls", "fresh: true", "", "c.yaml --fresh"),
    ("cls", "base: nowhere", "", "c.yaml base nowhere"),
    ("cls", "base: c.yaml", "", "c.yaml base 'c.yaml' 20"),
    ("cls", "base: b.yaml", "", "b.yaml 'modle' 'model'"),
    # Keys that stand twice. YAML forbids them, but PyYAML silently keeps the last one.
    ("cls", "model: {depth: 2}\noptim: {lr: 1.0}\nmodel: {num_heads: 3}", "", "c.yaml 3 'model' 1"),
    ("cls", "optim:\n  lr: 1.0\n  eps: 1.0\n  lr: 2.0", "", "c.yaml 4 'lr' 2"),
    ("cls", "model: {kwargs: {a: 1, a: 2}}", "", "c.yaml 1 'a' twice"),
    ("cls", "model.depth: 3\nmodel: {depth: 2}", "", "c.yaml model.depth twice"),
    ("cls", "", "--model '{depth: 3, depth: 2}'", "--model 1 'depth' twice"),
    ("cls", "", "--model.kwargs '{a: 1, a: 2}'", "--model.kwargs 1 'a' twice"),
    ("cls", "seed: many", "--log-every 3", "c.yaml seed int many"),
])  # fmt: skip
def test_mistakes_are_one_line(tmp_path, script, text, argv, facts):
    (tmp_path / "b.yaml").write_text("modle: 1")
    refuse(facts, written, tmp_path, script, text, argv)


@pytest.mark.parametrize("options", ["", "--optim.min_lr 0.0002"], ids=["in the file", "an option"])
def test_a_key_without_effect_is_of_the_file_unless_an_option_gives_it(tmp_path, options):
    text = "optim: {schedule: constant, min_lr: 0.0001}"
    with one_line("optim.min_lr") as error:
        written(tmp_path, "cls", text, options)
    start = "optim.min_lr"
    if not options:
        start = f"--config {tmp_path}/c.yaml: optim.min_lr"
    assert str(error.value).startswith(start)


NOT_YAML = {
    "deep nesting": f"model: {{kwargs: {{a: {'[' * 3000 + ']' * 3000}}}}}".encode(),
    "a long number": f"seed: {'9' * 9999}".encode(),
    "bytes": b"\x00\x01\x02",
    "an open list": b"max_steps: [1",
    "a tag": b"seed: !!python/name:os.system",
    "two documents": b"seed: 1\n---\nseed: 2\n",
    "tabs": b"model:\n\tdepth: 1\n",
    "Latin 1": b"output: \xe9",
}


@pytest.mark.parametrize("content", NOT_YAML.values(), ids=NOT_YAML)
def test_files_that_are_no_yaml(tmp_path, content):
    file = tmp_path / "c.yaml"
    file.write_bytes(content)
    with one_line(f"{file} YAML") as error:
        parse("--config", str(file))
    assert len(str(error.value)) < 2000


def test_texts_are_only_texts():
    """A value is not expanded or run as a shell would do."""
    for text in ("$(touch x)", "`touch x` ~", "../../${HOME}", "%s%n \u202e", "x" * 100_000):
        assert parse(f"--output={text}").output == text


def test_arguments_that_the_data_decide():
    model = parse("--model.kwargs", "{num_classes: 5, drop_rate: 0.1}").model
    model.refuse_other(num_classes=5, in_chans=1)
    refuse("model.kwargs.num_classes 5 10", model.refuse_other, num_classes=10)


def test_changed_keys():
    old = parse("--max-steps", "5", "--optim.lr", "0.1").tree()
    options = "--max-steps 9 --optim.lr 0.2 --data.workers 0 --model.depth 3 --fresh"
    new = parse(*options.split())
    assert changed_keys(old, new, []) == ["model.depth: None -> 3", "optim.lr: 0.1 -> 0.2"]
    assert changed_keys(old, new, ["model.depth", "optim.lr"]) == []
    assert changed_keys(yaml.safe_load(yaml.safe_dump(new.tree())), new, []) == []
    # A key without effect in the new run is no change: a constant schedule does not use min_lr.
    falls = parse("--optim.min_lr", "1e-5").tree()
    assert changed_keys(falls, parse("--optim.schedule", "constant"), ["optim.schedule"]) == []


def test_a_saved_configuration_reads_back(tmp_path):
    assert not {"fresh", "dry_run", "allow_change"} & set(parse("--fresh").tree())
    config = parse("--model.head_budget", "[[1,2],[2,3]]", "--optim.betas", "[0.9, 0.95]")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.tree()))
    assert parse("--config", str(file)) == config


SHIPPED = [
    path for path in sorted((ROOT / "configs").rglob("*.yaml")) if path.parent.name != "accelerate"
]


def configuration_name(path):
    return f"{path.parent.name}/{path.name}"


def config_class_of(path):
    """Return the class of a shipped configuration, by its folder."""
    if path.parent.name == "text":
        return LanguageConfig
    return DitConfig if "dit" in str(path.relative_to(ROOT)) else ClsConfig


def assert_values(section, **expected):
    """Assert the values of keys of a configuration or section."""
    assert {name: getattr(section, name) for name in expected} == expected


@pytest.mark.parametrize("path", SHIPPED, ids=configuration_name)
def test_shipped_configs_are_valid(path):
    """Each configuration can be parsed, names an output folder of its own, and begins with a header."""
    config = parse("--config", str(path), config_class=config_class_of(path))
    assert config.output == f"runs/{path.parent.name}/{path.stem}"
    # The header is a comment with the command, the hardware, the hours and the expected result.
    assert path.read_text().startswith("#")


@pytest.mark.parametrize(
    "name, options, billions",
    [
        ("moh_llm_small", "", 100),
        ("moh_llm_base", "", 100),
        ("moh_llm_base", "--max_steps 47684", 200),
        ("moh_llama3_stage1", "", 300),
        ("moh_llama3_stage2", "", 100),
    ],
)
def test_the_schedules_of_language_models(name, options, billions):
    """The keys are those of Jin 2024, tables B to D, and the number of tokens is `billions`."""
    config = parse("--config", f"text/{name}", *options.split(), config_class=LanguageConfig)
    optim = config.optim
    tokens_per_step = optim.batch_size * config.data.block
    assert tokens_per_step == (2**24 if config.data.block == 8192 else 2**22)
    assert 0 <= config.max_steps * tokens_per_step - billions * 10**9 < tokens_per_step
    assert_values(optim, schedule="cosine", weight_decay=0.1, clip_norm=1.0, warmup_lr=1e-7)
    assert optim.batch_size % (optim.accumulation * 8) == 0
    if name == "moh_llama3_stage1":
        assert_values(optim, lr=6e-5, min_lr=6e-6, warmup_steps=50)
        assert config.balance_weight == 0.0
        assert (config.model.convert or {}).get("head_budget") is None
    elif name == "moh_llama3_stage2":
        assert_values(optim, lr=2e-5, min_lr=1e-6, warmup_steps=50)
        assert config.balance_weight == 0.01
        assert config.model.convert["head_budget"] == [[16, 8]] * 32
    else:
        assert config.balance_weight == 0.01
        assert sum(source["weight"] for source in config.data.mixture) == pytest.approx(100)
        if name == "moh_llm_small":
            assert config.model.name == "clm_moh_small_75"
            assert_values(optim, lr=3e-4, min_lr=pytest.approx(3e-5), warmup_steps=2000)
        else:
            assert config.model.name == "clm_moh_base_75"
            assert_values(optim, lr=5e-4, min_lr=pytest.approx(5e-5), warmup_steps=500)


RECIPE = [f"moh_transnext_{size}" for size in ("small_80", "small_75", "base_75", "base_50")]
RECIPE += [f"moh_vit_{size}_patch16_224" for size in ("tiny", "small", "base", "large")]


@pytest.mark.parametrize("name", RECIPE)
def test_the_papers_recipe(name):
    """The keys are the options that Jin 2024 released. ImageNet's 1,281,167 images are 1251.1 steps of 1024 an epoch."""
    config = parse("--config", f"cls/{name}")
    assert config.model.name == name
    assert_values(
        config,
        output=f"runs/cls/{name}",
        label_smoothing=0.1,
        balance_weight=0.01,
    )
    assert config.ema.decay == 0
    assert_values(
        config.optim,
        lr=1e-3,
        warmup_lr=1e-6,
        min_lr=1e-5,
        weight_decay=0.05,
        eps=1e-8,
        clip_norm=1.0,
        batch_size=1024,
        schedule="cosine",
        betas=(0.9, 0.999),
    )
    assert config.steps(1_281_167) == (375342, 375342, 6256)
    assert_values(
        config.data,
        augment="imagenet",
        repeats=3,
        auto_augment="rand-m9-mstd0.5-inc1",
        erase_prob=0.25,
        erase_mode="pixel",
        crop_scale=(0.08, 1.0),
        img_size=224,
    )
    assert_values(config.mix, mixup=0.8, cutmix=1.0, prob=1.0, switch_prob=0.5)
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
    # max_steps below the epochs, as in a trial of the first steps, does not shorten the schedule.
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
    "name, distributed_type, wrap_policy",
    [
        ("ddp", "MULTI_GPU", None),
        ("fsdp2", "FSDP", "NO_WRAP"),
        ("fsdp2_layers", "FSDP", "TRANSFORMER_BASED_WRAP"),
    ],
)
def test_accelerate_reads_the_launch_files(name, distributed_type, wrap_policy):
    from accelerate.commands.config.config_args import load_config_from_file

    launch = load_config_from_file(str(ROOT / "configs" / "accelerate" / f"{name}.yaml"))
    assert str(launch.distributed_type).endswith(distributed_type)
    assert launch.mixed_precision == "no"
    if distributed_type == "FSDP":
        assert launch.fsdp_config["fsdp_version"] == 2
        assert launch.fsdp_config["fsdp_auto_wrap_policy"] == wrap_policy


def test_what_an_option_makes_idle_is_left_out_of_the_file(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text("optim: {min_lr: 0.0001, lr: 0.1}\nmodel: {name: moh_vit, head_budget: 0.5}\n")
    config = parse("--config", str(file), "--optim.schedule", "constant", "--model.router", "dense")
    assert (config.optim.min_lr, config.optim.lr, config.model.head_budget) == (0, 0.1, None)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert_says(said, f"{file} optim.min_lr 0.0001 optim.schedule constant model.head_budget 0.5")
    # The configuration that the run saves has no such keys left, and reads back without a line.
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.tree()))
    assert parse("--config", str(tmp_path / "run.yaml")) == config
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "config_class, task, config, baseline",
    [
        (ClsConfig, "classification", "cls/cifar10_small_cpu", "--model.router dense"),
        (ClsConfig, "classification", "quickstart/cls", "--model.router mae"),
        (DitConfig, "diffusion", "dit/cifar10_small_cpu", "--model.name dit_small_patch2"),
        (DitConfig, "diffusion", "quickstart/dit", "--model.name dit_small_patch2"),
    ],
)
def test_a_dense_baseline_has_all_heads(config_class, task, config, baseline):
    """One option turns a configuration with a budget into a baseline that runs all heads."""
    model = parse("--config", config, *baseline.split(), config_class=config_class).model
    arguments = dict(model.arguments(), img_size=32)
    assert head_budget(create(model.name, task, **arguments))["share"] == 1


DIT = [
    f"moh_dit_{size}_patch2_{share}"
    for size in ("small", "base", "large", "xlarge")
    for share in (90, 75)
]


@pytest.mark.parametrize("name", DIT)
def test_the_papers_diffusion_recipe(name):
    """The keys are those of DiT (Peebles 2023, section 4), with the balance weight that MoH released."""
    config = parse("--config", f"dit/{name}", config_class=DitConfig)
    assert config.model.name == name
    assert_values(
        config,
        output=f"runs/dit/{name}",
        label_drop=0.1,
        balance_weight=0.01,
        learn_sigma=True,
        tf32=True,
        max_steps=2_000_000 if "xlarge" in name else 400_000,
    )
    assert_values(
        config.optim,
        lr=1e-4,
        schedule="constant",
        weight_decay=0.0,
        betas=(0.9, 0.999),
        batch_size=256,
        accumulation=1,
        clip_norm=0.0,
        warmup_steps=0,
    )
    assert_values(config.ema, decay=0.9999, warmup=False)
    assert config.data.augment == "flip"


JIT = {  # scale of guidance, noise_scale, side of the images, further arguments of the model
    "jit_base_patch16": (2.9, None, 256, None),
    "jit_base_patch16_75": (2.9, None, 256, None),
    "jit_large_patch16": (2.4, None, 256, None),
    "jit_large_patch16_75": (2.4, None, 256, None),
    "jit_huge_patch16": (2.2, None, 256, dict(middle_dropout=0.2)),
    "jit_base_patch32": (2.9, 2.0, 512, None),
    "jit_large_patch32": (2.5, 2.0, 512, None),
    "jit_huge_patch32": (2.3, 2.0, 512, dict(middle_dropout=0.2)),
}


@pytest.mark.parametrize("name", JIT)
def test_the_recipe_of_jit(name):
    """The keys are those of JiT's released training script and README (Li and He 2025)."""
    cfg_scale, noise_scale, img_size, kwargs = JIT[name]
    config = parse("--config", f"dit/{name}", config_class=DitConfig)
    assert config.model.name.removeprefix("moh_") == name and config.model.kwargs == kwargs
    assert_values(config.preview, sampler="heun", steps=50, cfg_scale=cfg_scale)
    assert config.preview.cfg_interval == (0.0, 0.9)  # 0.1 to 1 in JiT's time
    assert_values(
        config.flow, predict="x", loss="velocity", location=0.8, spread=0.8, noise_scale=noise_scale
    )
    assert_values(config.optim, lr=2e-4, batch_size=1024, betas=(0.9, 0.95), weight_decay=0.0)
    assert (config.data.img_size, config.label_drop, config.ema.decay) == (img_size, 0.1, 0.9999)


def test_the_nine_cells_of_jits_ablation():
    """The cells of table 2a of Li and He 2025 differ in prediction and loss alone."""
    cells = {}
    for predict, loss in itertools.product(PREDICTS, PREDICTS):
        name = f"jit_ablation_{predict}_{loss}"
        tree = parse("--config", f"dit/{name}", config_class=DitConfig).tree()
        assert tree.pop("output") == f"runs/dit/{name}"
        assert (tree["flow"].pop("predict"), tree["flow"].pop("loss")) == (predict, loss)
        cells[name] = tree
    first, *others = cells.values()
    assert len(others) == 8 and all(other == first for other in others)
    jit = parse("--config", "dit/jit_base_patch16", config_class=DitConfig).tree()
    assert first["preview"].pop("cfg_interval") != jit["preview"].pop("cfg_interval")
    model = first.pop("model")
    for section in set(first) - {"flow"}:
        assert first[section] == jit[section]
    block = dict(norm_layer="rmsnorm", swiglu_mlp=True)
    assert (model["name"], model["patch_size"], model["kwargs"]) == ("dit_base_patch2", 16, block)


def test_what_a_file_takes_from_its_base(tmp_path):
    (tmp_path / "sub").mkdir()
    first = "seed: 1\nmax_steps: 5\nmodel: {depth: 2, kwargs: {a: 1}}\nbase: quickstart/cls\n"
    (tmp_path / "first.yaml").write_text(first)
    (tmp_path / "sub" / "second.yaml").write_text(
        "base: ../first.yaml\nseed: 2\nmodel: {kwargs: {b: 1}}\n"
    )
    config = parse("--config", str(tmp_path / "sub" / "second.yaml"), "--max-steps", "7")
    assert (config.seed, config.max_steps, config.model.depth) == (2, 7, 2)
    assert config.model.kwargs == {"b": 1}  # a dict is replaced as a whole, as any value
    assert config.model.embed_dim == parse("--config", "quickstart/cls").model.embed_dim
    assert "base" not in config.tree()
    (tmp_path / "third.yaml").write_text(
        "base: first.yaml\nmodel: {kwargs.b: 1, kwargs.c: {d: 2}}\n"
    )
    config = parse("--config", str(tmp_path / "third.yaml"), "--model.kwargs.c.d", "3")
    assert config.model.kwargs == {"a": 1, "b": 1, "c": {"d": 3}}


def test_a_list_of_mappings_has_no_entries_by_name():
    argv = ["--model.name", "clm_base", "--data.mixture.root", "text"]
    refuse("data.mixture.root data.mixture", parse, *argv, config_class=LanguageConfig)


@pytest.mark.parametrize(
    "entries, facts",
    [
        ("kwargs.a: 1, kwargs: {b: 2}", "model.kwargs model.kwargs.a"),
        ("kwargs: {b: 2}, kwargs.a: 1", "model.kwargs model.kwargs.a"),
        ("kwargs.a: 1, kwargs.a.b: 2", "model.kwargs.a model.kwargs.a.b"),
    ],
    ids=["entry first", "mapping first", "entry of an entry"],
)
def test_a_file_sets_an_entry_of_a_mapping_once(tmp_path, entries, facts):
    """Which of the two is meant would follow from their order, which YAML says means nothing."""
    (tmp_path / "c.yaml").write_text(f"model: {{{entries}}}\n")
    refuse(f"c.yaml same {facts}", parse, "--config", str(tmp_path / "c.yaml"))


def test_dense_families_have_no_routers():
    """Keys of routers are then refused."""
    families = [name for name in timm.list_models(module="dit") if not name.startswith("moh_")]
    for name in families:
        config = parse("--model.name", name, config_class=DitConfig)
        assert config.routers() == [("dense", {})], name


def test_options_win_over_files_wherever_they_stand(tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 1\nmodel: {kwargs: {a: 1, b: 1}}\nlog_every: 3\n")
    (tmp_path / "b.yaml").write_text("log_every: 4\n")
    files = ["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")]
    options = ["--seed", "7", "--model.kwargs.b", "2"]
    found = parse(*options, *files)
    assert parse(*files, *options) == found
    assert parse(*files[:2], *options, *files[2:]) == found
    assert (found.seed, found.log_every, found.model.kwargs) == (7, 4, {"a": 1, "b": 2})
    assert found.given == {"seed", "model.kwargs"}


def test_validation_has_keys_of_its_own(tmp_path, capsys):
    def validation(*argv):
        return parse(*argv, config_class=ValidateConfig)

    # The configuration of a run has keys that validation does not have, and ignores.
    run = "--data.root shards --data.augment imagenet --seed 3 --print_config"
    with pytest.raises(SystemExit):
        parse(*run.split())
    (tmp_path / "config.yaml").write_text(capsys.readouterr().out)
    config = validation("--checkpoint", str(tmp_path), "--data.workers", "0")
    assert (config.data.root, config.data.augment, config.data.workers) == ("shards", "imagenet", 0)
    assert config.checkpoint == str(tmp_path) and not hasattr(config, "seed")
    (tmp_path / "own.yaml").write_text("max_steps: 3\ndata: {eval_batch_size: 7}\n")
    config = validation("--config", str(tmp_path / "own.yaml"), "--checkpoint", str(tmp_path))
    assert (config.data.root, config.data.eval_batch_size) == (None, 7)
    refuse("dry_run", validation, "--checkpoint", "x", "--dry-run")
