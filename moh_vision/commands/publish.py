"""Publish a run: a folder for timm, diffusers or transformers, with a model card; docs/guides/convert.md.

python -m moh_vision publish RUN --output FOLDER
python -m moh_vision publish RUN --output FOLDER --repo OWNER/NAME --license apache-2.0

RUN is a run of train_cls.py, train_dit.py or train_text.py, its checkpoints/step_N, or a .safetensors
file in either. `hf upload OWNER/NAME FOLDER .` makes a repository of the folder on the Hugging Face hub.
"""

import re
import shlex
import tempfile
from pathlib import Path

import timm
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id
from timm.data import ImageNetInfo
from timm.models import get_pretrained_cfg
from torch import nn

from moh_vision.attention import head_budget, model_budgets
from moh_vision.attention.model_heads import routers_of
from moh_vision.attention.routers import is_plain
from moh_vision.commands.runs import (
    COLUMNS,
    TEXT,
    Column,
    NoScores,
    ScoredRun,
    as_written,
    at_shares,
    find_run,
    number_at,
    starts_of,
    with_scores,
)
from moh_vision.common.errors import reason_of
from moh_vision.common.io import give_name, run_of
from moh_vision.common.progress import say
from moh_vision.common.wings import DIFFUSION
from moh_vision.data.decode import AS_STORED
from moh_vision.data.hub import hub_name
from moh_vision.data.splits import RECORD
from moh_vision.engine.opened import Opened
from moh_vision.models.describe import describe, full_name
from moh_vision.models.weights import Form, Weights, find_weights
from moh_vision.opening import open_weights

# By task of text: the hub's name of the task, the transformers class.
TASKS = {
    TEXT["mt"]: ("translation", "AutoModelForSeq2SeqLM"),
    TEXT["mlm"]: ("fill-mask", "AutoModelForMaskedLM"),
    TEXT["clm"]: ("text-generation", "AutoModelForCausalLM"),
}
# Arguments of our ViTs that timm's ViTs do not have; a dense ViT does not need them.
ROUTING = (
    "base",
    "router",
    "scope",
    "executor",
    "router_kwargs",
    "head_budget",
    "head_budget_shape",
    "mlp_budget",
    "mlp_budget_shape",
    "mlp_groups",
    "pos_embed_std",
)
# Entries of a timm configuration that describe only its original weights.
OF_SOURCE = ("tag", "license", "url", "hf_hub_id", "file", "test_input_size", "test_crop_pct")


def scores_of(run: ScoredRun, found: Weights) -> ScoredRun | None:
    """Return the run with the scores of these weights, or None if nothing scored them."""
    file = found.file
    metadata = found.metadata
    if "best_top1" in metadata:
        scores = {"top1": number_at(metadata, ("best_top1",), file)}
        scored_on = f"the highest of the validations on {run.config.get('data.root')}, after {metadata.get('step')} steps"
        return run._replace(scores=scores, scored_on=scored_on)
    try:
        scored = with_scores(run)
    except NoScores:
        return None
    in_run = file.parent.resolve() == run.folder.resolve()
    drawn = run.json("scores.json") if run.wing == "diffusion" else {}
    results = {} if drawn else run.json("results.json")
    same_weights = False  # whether the scores are of these weights, not of others of the run
    signatures = ""
    if drawn:
        from moh_vision.diffusion.scores import record_text

        same_weights = scored.sampling.get("weights_sha256") == found.sha256
        signatures = record_text({key: drawn.get(key) for key in ("protocol", "versions")})
    elif results:
        step = results.get("step")
        if file.stem == "best":  # "step" is the run's last one, which may come after its best one
            step = results.get("best_step")
        same_name = Path(str(results.get("weights"))).stem == file.stem
        same_weights = in_run and same_name and metadata.get("step", step) == step
        translations = results.get("bleu", {}).get("soft", {})
        signatures = "\n".join(form["signature"] for form in translations.values())
    elif in_run:
        same_name = file.name == find_weights(run.folder).file.name
        same_weights = same_name and metadata.get("step") == scored.steps
    # The command `lm`, which scores suites, reads model.safetensors.
    of_suites = in_run and file.stem == "model"
    kept = {}
    for key, value in scored.scores.items():
        applies = same_weights if key in COLUMNS else of_suites
        if applies and value is not None:
            kept[key] = value
    if not kept:
        return None
    return scored._replace(
        scores=kept, scored_on="; ".join([scored.scored_on, *signatures.splitlines()])
    )


# Each `save_` function saves a folder and returns values for the card: the library, the hub's task, the model's name and
# what the card's example needs.


def save_classifier(run: ScoredRun, opened: Opened, folder: Path, scored: ScoredRun | None) -> dict:
    """Save a folder that timm loads, with the preprocessing of the run's validation."""
    model = opened.model
    arguments = dict(opened.metadata["arguments"])
    cfg = {**model.pretrained_cfg, **dict.fromkeys(OF_SOURCE), "license": license_of_weights(run)}
    names = cfg.pop("label_names")
    words = ImageNetInfo().label_descriptions(as_dict=True)
    descriptions = {name: words[name] for name in names if name in words}
    further = dict(label_names=names, label_descriptions=descriptions)
    if opened.decoding != AS_STORED:  # timm has no such entry, and reads files as they are stored
        further["decoding"] = opened.decoding.record
    # The tag after the point names weights. Where they came from a local folder, timm records a wrong tag: drop a tag
    # that the run did not ask for.
    if not str(run.config.get("model.pretrained")).endswith(arguments.get("base") or ""):
        arguments["base"] = arguments["base"].partition(".")[0]
    title = (arguments.get("base") or opened.metadata["architecture"]).partition(".")[0]
    plain = as_timm(model, title.removeprefix("moh_"), arguments)
    router = arguments.get("router")
    if plain is not None:
        title = cfg["architecture"] = title.removeprefix("moh_")
        model, arguments = plain
    shown = title
    if arguments.get("base") and router is not None and not is_plain(router):
        shown = f"{title} converted to {router}"
    shown = full_name(shown, arguments)
    model.pretrained_cfg = model.default_cfg = cfg
    timm.models.save_for_hf(
        model, str(folder), model_config=further, model_args=arguments, safe_serialization=True
    )
    return dict(
        library="timm",
        task="image-classification",
        model=shown,
        ours=plain is None,
        colours="L" if model.in_chans == 1 else "RGB",
        decoding=further.get("decoding"),
        classes=model.num_classes,
    )


def as_timm(model: nn.Module, name: str, arguments: dict) -> tuple[nn.Module, dict] | None:
    """Return timm's model of this name with the weights of a dense `model`, and its arguments.

    Return None if the model routes heads, or timm has no model with these arguments and tensors.
    """
    if not is_plain(arguments.get("router")) or not timm.is_model(name):
        return None
    theirs = {key: value for key, value in arguments.items() if key not in ROUTING}
    try:
        plain = timm.create_model(name, **theirs)
        plain.load_state_dict(model.state_dict())
    except (TypeError, RuntimeError):  # arguments or tensors that timm lacks, such as kv_heads
        return None
    return plain, theirs


def license_of_weights(run: ScoredRun) -> str | None:
    """Return the license of the weights that a run started from, if timm's registry has them."""
    source = str(run.config.get("model.pretrained") or run.config.get("init_from"))
    cfg = get_pretrained_cfg(source.removeprefix("hf-hub:timm/"), allow_unregistered=True)
    if cfg is None:
        return None
    return cfg.license


def save_pipeline(run: ScoredRun, opened: Opened, folder: Path, scored: ScoredRun | None) -> dict:
    """Save a diffusers pipeline with its VAE, and with the sampler settings that the scores were made with."""
    from moh_vision.diffusion.config import SampleConfig
    from moh_vision.diffusion.loading import make_pipeline

    sampling = {}
    if scored is not None:
        for key in ("sampler", "steps", "cfg_scale"):
            if scored.sampling.get(key) is not None:
                sampling[key] = scored.sampling[key]
    weights = opened.metadata["weights"]
    config = SampleConfig(checkpoint=weights, num_images=0, save_pipeline=str(folder), **sampling)
    pipe = make_pipeline(config, opened.model, opened.metadata)
    if pipe.vae is not None:
        path = pipe.vae.config.get("_name_or_path") or ""
        pipe.vae.register_to_config(_name_or_path=without_paths(path))
    pipe.save_pretrained(folder)
    return dict(
        library="diffusers",
        task=None,
        model=named(opened),
        guidance=f"{config.cfg_scale:g}",
        steps=config.steps,
    )


def save_text(run: ScoredRun, opened: Opened, folder: Path, scored: ScoredRun | None) -> dict:
    """Save a transformers folder, with the run's tokenizers."""
    from transformers import GenerationConfig

    from moh_vision.language.data.vocabulary import TARGET, TOKENIZER, copy_tokenizers
    from moh_vision.language.models.weights import quiet

    task, auto = TASKS[run.task]
    if (run.folder / "generation_config.json").is_file():
        opened.model.generation_config = GenerationConfig.from_pretrained(run.folder)
    with quiet():
        opened.model.save_pretrained(folder)
    copy_tokenizers(run.folder, folder)
    source = (folder / TOKENIZER).is_file()
    target = (folder / TARGET / TOKENIZER).is_file()
    example = dict(auto=auto, source=source, target=target, beam=run.config.get("generate.beam"))
    return dict(library="transformers", task=task, model=named(opened), **example)


def named(opened: Opened) -> str:
    """Return the name of an opened model, followed by the arguments that its run changed."""
    return full_name(opened.metadata["architecture"], opened.metadata.get("arguments") or {})


SAVE = dict(classification=save_classifier, diffusion=save_pipeline, text=save_text)


def make_card(
    run: ScoredRun,
    opened: Opened,
    saved: dict,
    scored: ScoredRun | None,
    name: str,
    license: str | None,
) -> ModelCard:
    """Make the README.md of a repository, without absolute paths.

    Args:
        run: what `find_run` returned.
        opened: the run's model.
        saved: what a `save_` function returned.
        scored: the run with the scores of these weights, if there are any.
        name: name of the repository, or of the folder.
        license: license of the weights; None: the license of the weights that the run started from.
    """
    model = opened.model
    metadata = opened.metadata
    inputs, forward = opened.example()
    shown = []
    if scored:
        shown = [(COLUMNS.get(key, Column(key)), value, "") for key, value in scored.scores.items()]
    if scored and opened.weights.is_scored:
        by_share = at_shares([scored])
        for share in list(by_share)[:-1]:  # the scores at the last share are listed already
            (run_at_share,) = by_share[share]
            for key, value in run_at_share.scores.items():
                if value is not None:
                    shown.append((COLUMNS[key], value, f", at a share of {share}"))
    metadata_of_card = ModelCardData(
        library_name=saved["library"],
        pipeline_tag=saved["task"],
        datasets=datasets_of(run),
        license=license or license_of_weights(run),
        tags=["moh_vision"],
    )
    card = ModelCard.from_template(
        metadata_of_card,
        template_path=Path(__file__).with_name("model_card.md"),
        name=name,
        metadata=metadata,
        file=opened.weights.file.name,
        share=100 * head_budget(model)["share"],
        groups=100 * head_budget(model).get("mlp", {}).get("share", 0),
        set_share=share_arguments(model),
        run_task=run.task,
        own_modules=own_modules(model),
        size=describe(saved["model"], model, *inputs, **forward),
        data=data_of(run),
        trained_at=elastic_range(run),
        scores=[
            (f"{column.title}{at_share}", f"{value:.{column.digits}f}")
            for column, value, at_share in shown
        ],
        scored_on=scored and scored.scored_on,
        starts=starts_of({run.folder.name: run})[0],
        config=run.saved.text.rstrip(),
        **saved,
    )
    card.text = without_paths(card.text)
    # The card has read its own text: it is YAML, and says what it was made of.
    assert card.data.to_dict() == metadata_of_card.to_dict()
    return card


def own_modules(model: nn.Module) -> list[str]:
    """Return the modules outside the package that define routers of a model: who opens the folder must import them."""
    modules = {type(router).__module__ for router in routers_of(model)}
    return sorted(module for module in modules if not module.startswith("moh_vision."))


def elastic_range(run: ScoredRun) -> str:
    """Return the range of shares that a run with an elastic budget was trained at, as text; "" for another run."""
    ends = run.config.get("budget_range") or ()
    return " to ".join(map(str, ends))


def share_arguments(model: nn.Module) -> str:
    """Return the arguments of `set_head_budget` by which users set one share of all that a model chooses."""
    budgets = model_budgets(model)
    if not budgets.groups:
        return "model, SHARE"
    if budgets.chosen is budgets.groups:
        return "model, mlp=SHARE"
    return "model, SHARE, mlp=SHARE"


def datasets_of(run: ScoredRun) -> list[str] | None:
    """Return the names of the hub's data sets that a run used, for the card, or None if it used none."""
    roots = [source["root"] for source in run.config.get("data.mixture") or ()]
    if not roots:
        roots = [run.config.get("data.root")]
    names = [hub_name(str(root)) for root in roots]
    return list(dict.fromkeys(filter(None, names))) or None


def data_of(run: ScoredRun) -> str:
    """Return a sentence on the training data."""
    text = f"`{run.config.get('data.root')}`"
    if run.wing == "text":
        mixture = run.config.get("data.mixture")
        if mixture:
            text = ", ".join(
                f"`{source['root']}` (weight {source['weight']:g})" for source in mixture
            )
        text += f", split {run.config.get('data.train')}"
        if run.task == TEXT["mt"]:
            text += f", {run.config.get('data.source')} to {run.config.get('data.target')}"
        return f"{text}."
    try:
        counts = {split: outline["samples"] for split, outline in run.json(RECORD).items()}
    except (TypeError, KeyError):
        raise ValueError(f"{run.folder / RECORD}: not the record of a run's data") from None
    classes = max(map(len, counts.values()), default=0)
    parts = []
    if classes > 1:
        parts.append(f"{classes} classes")
    parts += [f"{sum(count):,} images in {split}" for split, count in counts.items() if sum(count)]
    if not parts:
        return f"{text}."
    return f"{text}: {', '.join(parts)}."


def without_paths(text: str) -> str:
    """Shorten absolute paths to their last part, because paths show names of users and folders."""
    return re.sub(r"(?<![\w.:/<~-])~?(?:/[\w.@+-]+)+/([\w.@+-]+)", r"\1", text)


def check_repo(repo: str) -> None:
    """Raise ValueError unless `repo` is OWNER/NAME, and a name that the hub accepts."""
    if repo.count("/") != 1:
        raise ValueError(f"--repo {repo}: expected OWNER/NAME")
    try:
        validate_repo_id(repo)
    except ValueError as error:
        raise ValueError(f"--repo {repo}: {reason_of(error)}") from None


def check_license(name: str) -> None:
    """Raise ValueError unless a name is written as the hub's names of licenses are; the hub refuses others."""
    if not re.fullmatch(r"[a-z0-9]+([.-][a-z0-9]+)*", name):
        raise ValueError(
            f"--license {name}: expected a name of the hub's, such as apache-2.0, cc-by-4.0 or other"
        )


def options(add) -> None:
    add("run", type=Path, metavar="RUN", help="run, its checkpoint, or a file of weights in either")
    add("--output", type=Path, required=True, metavar="FOLDER", help="a new folder")
    text = "for the card, as the hub calls it; left out: that of timm's weights that the run started from, or none"
    add("--license", metavar="NAME", help=text)
    text = "repository on the Hugging Face hub that the card's code loads; left out: the folder"
    add("--repo", metavar="OWNER/NAME", help=text)


def work(options) -> None:
    path = options.run
    folder = options.output
    repo = options.repo
    if repo:
        check_repo(repo)
    if options.license is not None:
        check_license(options.license)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    run = find_run(run_of(path))
    found = find_weights(path)
    # A diffusion run has no results.json: sample.py scores its samples.
    if found.form == Form.RUN and run.wing != DIFFUSION.name and not found.is_scored:
        say(f"{path}: the run has no results yet; its last weights are taken")
    opened = open_weights(found, command="publish", saved=run.saved)
    with as_written(f"{run.folder}: its scores are"):
        scored = scores_of(run, found)
    save = SAVE[opened.kind]
    # Write a hidden folder beside the final one and rename it at the end: no half-written folder has the final name.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        hidden = Path(temporary, folder.name)
        hidden.mkdir()
        saved = save(run, opened, hidden, scored)
        card = make_card(run, opened, saved, scored, repo or folder.name, options.license)
        card.save(hidden / "README.md")
        for weights in hidden.rglob("*.safetensors"):
            weights.chmod(0o644)  # safetensors makes its files readable by their owner alone
        give_name(hidden, folder)
    say(f"{folder}: for {saved['library']}, weights of {opened.metadata['weights']}")
    say(f"to upload it: hf upload {repo or 'OWNER/NAME'} {shlex.quote(str(folder))} .")
