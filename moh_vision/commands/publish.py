"""Publish a run: a folder that timm, diffusers or transformers load, with a model card; docs/guides/publish.md.

python -m moh_vision publish RUN --output FOLDER
python -m moh_vision publish RUN --output FOLDER --push OWNER/NAME --private --license apache-2.0

RUN is the folder of a run of train_cls.py, train_dit.py or train_text.py, RUN/checkpoints/step_N, or a .safetensors file in
either. --push makes a new repository on the Hugging Face hub and uploads the folder.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from huggingface_hub import HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.utils import validate_repo_id
from torch import nn

from moh_vision.attention import attention_layers, head_budget
from moh_vision.commands.runs import (
    COLUMNS,
    TEXT,
    NoScores,
    ScoredRun,
    find_run,
    mean_and_spread,
    model_of,
    number_at,
    read_json,
    read_run,
    starts_of,
)
from moh_vision.data.hub import PREFIX
from moh_vision.data.splits import RECORD
from moh_vision.engine.commands import Parser, exit_code, reason_of, refuse_output, say
from moh_vision.engine.io import __version__, give_name, hidden_path, run_of, sha256_of, step_of
from moh_vision.models.counts import count_parameters
from moh_vision.models.describe import describe
from moh_vision.models.weight_files import read_safetensors, weights_file
from moh_vision.models.weights import from_run
from moh_vision.opening import load_run

# What a text model's tokenizer puts around a text, as training did, and the class of transformers that loads the model.
TASKS = {
    TEXT["mt"]: ("translation", "$A </s>", "AutoModelForSeq2SeqLM"),
    TEXT["mlm"]: ("fill-mask", "<s> $A </s>", "AutoModelForMaskedLM"),
    TEXT["clm"]: ("text-generation", "</s> $A", "AutoModelForCausalLM"),
}
# Arguments of a ViT that timm's do not have, and a dense one does not need.
ROUTING = ("base", "router", "scope", "executor", "router_kwargs", "head_budget", "pos_embed_std")


class Saved(NamedTuple):
    """What a folder is for: the library that reads it, the hub's name of the task or None, code that uses it, the
    model's name."""

    library: str
    task: Optional[str]
    code: str
    model: Optional[str] = None


# ---------------------------------------------------------------- weights and scores


def weights_of(run: ScoredRun, path: Path) -> Path:
    """The file of weights that `path` means; of a finished run's folder those that its results are of.

    Raises:
        ValueError, FileNotFoundError: naming the path.
    """
    results = run.folder / "results.json"
    whole = path.is_dir() and step_of(path) is None
    if whole and not results.is_file() and run.kind != "diffusion":  # whose samples are scored by other commands
        say(f"{path}: the run has no results yet; its last weights are taken")
    if whole and results.is_file():
        named = Path(str(read_json(results).get("weights"))).name  # of a classifier "ema" or "model"
        file = (run.folder / named).with_suffix(".safetensors")
        if file.is_file():
            return file
    return weights_file(str(path))


def scores_of(run: ScoredRun, file: Path, about: dict) -> Optional[ScoredRun]:
    """The run with the scores of the weights in `file`, and how they were made; None if there are none of these weights.

    Args:
        about: metadata of the file.
    """
    if "best_top1" in about:
        how = f"the highest of the validations on {run.config.get('data.root')}, after {about.get('step')} steps"
        return run._replace(scores={"top1": number_at(about, ("best_top1",), file)}, how=how)
    try:
        scored = read_run(run.folder)
    except NoScores:
        return None
    in_run = file.parent.resolve() == run.folder.resolve()
    if run.kind == "diffusion" and (run.folder / "scores.json").is_file():
        from moh_vision.diffusion.scores import record_text

        found = read_json(run.folder / "scores.json")
        own = scored.sampling.get("weights_sha256") == sha256_of(file)
        more = record_text({key: found.get(key) for key in ("protocol", "versions")})
    elif (run.folder / "results.json").is_file():
        found = read_json(run.folder / "results.json")
        own = in_run and Path(str(found.get("weights"))).stem == file.stem
        step = found.get("best_step" if file.stem == "best" else "step")  # with patience it ends after its best weights
        own = own and about.get("step", step) == step
        more = "\n".join(form["signature"] for form in found.get("bleu", {}).get("soft", {}).values())
    else:
        own = in_run and file.name == weights_file(str(run.folder)).name and about.get("step") == scored.steps
        more = ""
    of_suites = in_run and file.stem == "model"  # which the suites' command reads
    kept = {k: v for k, v in scored.scores.items() if (own if k in COLUMNS else of_suites) and v is not None}
    return scored._replace(scores=kept, how="; ".join([scored.how, *more.splitlines()])) if kept else None


# ---------------------------------------------------------------- what each library saves


def save_classifier(run: ScoredRun, file: Path, folder: Path, scored: Optional[ScoredRun], name: str) -> Saved:
    """timm's folder, whose preprocessing is that of the run's validation."""
    import timm
    from timm.data import ImageNetInfo

    from moh_vision.classification.prepared import prepared_as_trained

    model, about = from_run(str(file), "classifier")
    cfg = prepared_as_trained(model, about).pretrained_cfg
    names = cfg.pop("label_names")
    cfg.update(dict.fromkeys(("tag", "license", "url", "hf_hub_id", "file", "test_input_size", "test_crop_pct")))
    words = ImageNetInfo().label_descriptions(as_dict=True)
    labels = dict(label_names=names, label_descriptions={name: words[name] for name in names if name in words})
    cfg["license"] = license_of_weights(run)
    arguments = dict(about["arguments"])
    # The tag after the point names weights; of weights from a folder of one's own timm records it too, and wrongly.
    if not str(run.config.get("model.pretrained")).endswith(arguments.get("base") or ""):
        arguments["base"] = arguments["base"].partition(".")[0]
    title, imports = (arguments.get("base") or about["architecture"]).partition(".")[0], ""
    plain = as_timm(model, title.removeprefix("moh_"), arguments)
    if plain is None:
        imports = "import moh_vision  # registers the models with timm\n"
    else:
        title = title.removeprefix("moh_")
        (model, arguments), cfg = plain, dict(cfg, architecture=title)
        model.pretrained_cfg = model.default_cfg = cfg
    timm.models.save_for_hf(model, str(folder), model_config=labels, model_args=arguments, safe_serialization=True)
    colours = "L" if model.in_chans == 1 else "RGB"
    code = f"""{imports}import timm
from PIL import Image

model = timm.create_model("{"hf-hub" if "/" in name else "local-dir"}:{name}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
logits = model(transform(Image.open("image.png").convert("{colours}"))[None])  # [1, {model.num_classes}]
print(model.pretrained_cfg["label_names"][logits.argmax()])"""
    return Saved("timm", "image-classification", code, title)


def as_timm(model: nn.Module, name: str, arguments: dict) -> Optional[Tuple[nn.Module, dict]]:
    """timm's own model of that name with the weights of a dense one of ours, and its arguments; None if it has no
    such model."""
    import timm

    if arguments.get("router") != "dense" or not timm.is_model(name):
        return None
    theirs = {key: value for key, value in arguments.items() if key not in ROUTING}
    try:
        plain = timm.create_model(name, **theirs)
        plain.load_state_dict(model.state_dict())
    except (TypeError, RuntimeError):  # arguments or tensors that are ours alone, such as kv_heads
        return None
    return plain, theirs


def license_of_weights(run: ScoredRun) -> Optional[str]:
    """The license of the weights in timm's registry that a run started from; None if there are none."""
    from timm.models import get_pretrained_cfg

    source = str(run.config.get("model.pretrained") or run.config.get("init_from")).removeprefix("hf-hub:timm/")
    cfg = get_pretrained_cfg(source, allow_unregistered=True)
    return cfg and cfg.license


def save_pipeline(run: ScoredRun, file: Path, folder: Path, scored: Optional[ScoredRun], name: str) -> Saved:
    """A pipeline of diffusers, its VAE inside, with the sampler of the scores."""
    from moh_vision.diffusion.config import SampleConfig
    from moh_vision.diffusion.loading import open_pipeline

    drawn = scored.sampling if scored is not None else {}
    draws = {key: drawn[key] for key in ("sampler", "steps", "cfg_scale") if drawn.get(key) is not None}
    config = SampleConfig(checkpoint=str(file), num_images=0, save_pipeline=str(folder), **draws)
    pipe, _ = open_pipeline(config)
    if pipe.vae is not None:
        pipe.vae.register_to_config(_name_or_path=without_paths(pipe.vae.config.get("_name_or_path") or ""))
    pipe.save_pretrained(folder)
    code = f"""from moh_vision.diffusion import MoHDiTPipeline

pipe = MoHDiTPipeline.from_pretrained("{name}")
images = pipe([0, 1], guidance_scale={config.cfg_scale:g}, num_inference_steps={config.steps}).images
# The same: DiffusionPipeline.from_pretrained("{name}", custom_pipeline="{name}", trust_remote_code=True)"""
    return Saved("diffusers", None, code)


def save_text(run: ScoredRun, file: Path, folder: Path, scored: Optional[ScoredRun], name: str) -> Saved:
    """A folder of transformers, with the tokenizers that the run has."""
    from transformers import GenerationConfig

    from moh_vision.language.models.weights import quiet

    task, template, auto = TASKS[run.kind]
    model = load_run(file)
    if (run.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(run.folder)
    with quiet():
        model.save_pretrained(folder)
    decode = "tokenizer"
    lines = ["import moh_vision.language.models.create  # registers the models with transformers"]
    lines += [f"from transformers import {auto}, AutoTokenizer", "", f'model = {auto}.from_pretrained("{name}")']
    if save_tokenizer(run.folder / "tokenizer.json", folder, template):
        lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{name}")')
        if save_tokenizer(run.folder / "target_tokenizer.json", folder / "target", template):
            lines.append(f'target = AutoTokenizer.from_pretrained("{name}", subfolder="target")')
            decode = "target"
        mask = "{tokenizer.mask_token}"
        text = f'f"a text with a{mask} in it"' if task == "fill-mask" else '"a text"'
        lines.append(f'inputs = tokenizer({text}, return_tensors="pt")')
        if task == "fill-mask":
            lines.append("logits = model(**inputs).logits  # [1, tokens, vocabulary]")
        else:
            beams = f"num_beams={run.config.get('generate.beam')}, " if task == "translation" else ""
            lines.append(f"ids = model.generate(**inputs, {beams}max_new_tokens=50)")
            lines.append(f"print({decode}.decode(ids[0], skip_special_tokens=True))")
    return Saved("transformers", task, "\n".join(lines))


def save_tokenizer(file: Path, folder: Path, template: str) -> bool:
    """A run's tokenizer as AutoTokenizer reads it, which puts around a text what training did; False if there is none.

    As where BLEU is counted, a decoded text does not begin with the blank that byte-level BPE puts before its first word.
    """
    from tokenizers.decoders import Sequence, Strip
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from moh_vision.language.data.foreign import is_ours
    from moh_vision.language.data.vocabulary import BOS, EOS, MASK, PAD, SPECIALS, UNK, Vocabulary

    if not file.is_file():
        return False
    if not is_ours(file):
        AutoTokenizer.from_pretrained(file.parent).save_pretrained(folder)
        return True
    roles = dict(pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK)
    vocabulary = Vocabulary.load(file)
    if vocabulary.specials > MASK:
        roles["mask_token"] = MASK
    names = {role: SPECIALS[number] for role, number in roles.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), **names)
    around = [(SPECIALS[number], number) for number in (BOS, EOS) if SPECIALS[number] in template]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=around)
    if vocabulary.kind == "bpe":
        tokenizer.backend_tokenizer.decoder = Sequence([tokenizer.backend_tokenizer.decoder, Strip(" ", 1, 0)])
    tokenizer.save_pretrained(folder)
    return True


# ---------------------------------------------------------------- the card


def make_card(
    run: ScoredRun,
    file: Path,
    about: dict,
    saved: Saved,
    scored: Optional[ScoredRun],
    name: str,
    license: Optional[str],
) -> ModelCard:
    """The README.md of a repository: what the model is, how it is loaded, made and scored.

    Absolute paths are shortened to their last part, because others read it.

    Args:
        file, about: the weights, and their metadata.
        scored: see `scores_of`.
        name: OWNER/NAME, or that of the folder.
        license: the hub's name of one; None: that of the weights it started from, if timm says it.
    """
    license = license or license_of_weights(run)
    about_model = dict(library_name=saved.library, pipeline_tag=saved.task, license=license, tags=["moh_vision"])
    data = ModelCardData(**about_model, datasets=datasets_of(run))
    model, inputs, named = model_of(run)
    layers = attention_layers(model)
    architecture = about.get("architecture", run.model)  # of a converted run the latter is "pretrained"
    size = f"parameters: {count_parameters(model):,}"
    if layers:
        size = describe(architecture, model, *inputs, **named)
    averaged = ", ".join(map(str, sorted(about.get("averaged_steps", ()))))
    steps = f"step {about['step']}" if "step" in about else f"mean of steps {averaged}"
    values: Dict[str, Any] = dict(
        title=name.rpartition("/")[2] if "/" in name else saved.model or architecture,
        model=saved.model or architecture,
        share=f", {100 * head_budget(model)['share']:.1f} % of its attention heads active" if layers else "",
        kind=run.kind,
        weights=f"{file.name}, {steps}",
        code=saved.code,
        size=size,
        data=data_of(run),
        starts=starts_of({run.folder.name: run})[0],
        config=(run.folder / "config.yaml").read_text(encoding="utf-8", errors="replace").rstrip(),
    )
    if scored is not None:
        shown = [(*COLUMNS.get(key, (key, 2)), value) for key, value in scored.scores.items()]
        values.update(how=scored.how, scores=[(title, mean_and_spread([v], digits)) for title, digits, v in shown])
    template = Path(__file__).with_name("model_card.md")
    card = ModelCard.from_template(data, template_path=template, **values)
    card.text = without_paths(card.text)
    return card


def datasets_of(run: ScoredRun) -> Optional[List[str]]:
    """Data sets of the hub for the head of the card, where their names are links; a folder of that name is another set."""
    roots = [source["root"] for source in run.config.get("data.mixture") or ()] or [run.config.get("data.root")]
    named = [root.removeprefix(PREFIX).partition(":")[0] for root in map(str, roots) if root.startswith(PREFIX)]
    return list(dict.fromkeys(named)) or None


def data_of(run: ScoredRun) -> str:
    """A sentence about what the run was trained on."""
    text, record = f"`{run.config.get('data.root')}`", run.folder / RECORD
    if run.kind in TEXT.values():
        mixture = run.config.get("data.mixture") or ()
        text = ", ".join(f"`{source['root']}` (weight {source['weight']:g})" for source in mixture) or text
        pair = f", {run.config.get('data.source')} to {run.config.get('data.target')}" if run.kind == TEXT["mt"] else ""
        return f"{text}, split {run.config.get('data.train')}{pair}."
    if record.is_file():
        try:
            counts = {split: [n for _, n in outline["classes"]] for split, outline in read_json(record).items()}
            parts = [f"{sum(count):,} images in {split}" for split, count in counts.items() if sum(count)]
            text += f": {', '.join([f'{len(next(iter(counts.values())))} classes', *parts])}"
        except (TypeError, KeyError, StopIteration):
            raise ValueError(f"{record}: not the record of a run's data") from None
    return text + "."


def without_paths(text: str) -> str:
    """Absolute paths shortened to their last part: they would tell strangers names of users and folders."""
    return re.sub(r"(?<![\w.:/<~-])~?(?:/[\w.@+-]+)+/([\w.@+-]+)", r"\1", text)


# ---------------------------------------------------------------- the hub


def check_hub(api: HfApi, repo: str) -> None:
    """Raise ValueError unless a new repository can be made: a name, a token, a hub that answers, nothing under that name."""
    try:
        validate_repo_id(repo)
    except ValueError as error:
        raise ValueError(f"--push {repo}: {reason_of(error)}") from None
    if repo.count("/") != 1:
        raise ValueError(f"--push {repo}: expected OWNER/NAME")
    if not get_token():
        raise ValueError(f"--push {repo}: no token of the hub; `hf auth login` keeps one, or set HF_TOKEN")
    try:
        user = api.whoami()
        owners = [user["name"], *(org["name"] for org in user.get("orgs", []))]
        exists = api.repo_exists(repo)
    except Exception as error:  # of the hub and of the network, which share no class
        raise ValueError(f"--push {repo}: {api.endpoint} does not answer or refuses ({reason_of(error)})") from None
    if repo.partition("/")[0] not in owners:
        raise ValueError(f"--push {repo}: the token is of {owners[0]}, allowed owners are {', '.join(owners)}")
    if exists:
        raise ValueError(f"--push {repo}: exists; without --push, then hf upload {repo} FOLDER . adds a commit to it")


def push(api: HfApi, repo: str, folder: Path, private: bool) -> str:
    """Make a repository and upload a folder; returns its address.

    Raises:
        ValueError: naming the folder, which is whole.
    """
    try:
        ModelCard.load(folder / "README.md").validate()
        url = api.create_repo(repo, private=private or None)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=f"From moh_vision {__version__}")
    except Exception as error:  # see `check_hub`
        raise ValueError(f"--push {repo}: {reason_of(error)}; {folder} is whole: hf upload {repo} {folder} .") from None
    return str(url)


def publish(path: Path, folder: Path, repo: Optional[str] = None, license: Optional[str] = None) -> Tuple[str, Path]:
    """Write a folder to publish; nothing is there before all of it is.

    Args:
        path: a run, one of its checkpoints, or a .safetensors file in either.
        folder: a new one.
        repo: OWNER/NAME that the card names; None: the folder's name.
        license: for the card.

    Returns:
        (library that reads it, file of the weights)

    Raises:
        ValueError, FileNotFoundError: naming the run, file or folder.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    run = find_run(run_of(path))
    file = weights_of(run, path)
    about = read_safetensors(file, lambda name: False)[1]
    try:
        scored = scores_of(run, file, about)
    except (KeyError, TypeError, AttributeError) as error:  # files that were written by hand
        raise ValueError(f"{run.folder}: its scores are not as a run writes them ({reason_of(error)})") from None
    save = dict(classification=save_classifier, diffusion=save_pipeline).get(run.kind, save_text)
    hidden = hidden_path(folder)
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        hidden.mkdir()
        saved = save(run, file, hidden, scored, repo or folder.name)
        make_card(run, file, about, saved, scored, repo or folder.name, license).save(hidden / "README.md")
        for weights in hidden.rglob("*.safetensors"):
            weights.chmod(0o644)  # safetensors makes them private
        give_name(hidden, folder)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return saved.library, file


def main(argv: Optional[List[str]] = None) -> int:
    """The command; returns the exit code: 0, or 2 for a user's mistake."""
    parser = Parser("python -m moh_vision publish", __doc__)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="run, its checkpoint, or a file of weights in either")
    add("--output", type=Path, required=True, metavar="FOLDER", help="a new folder")
    add(
        "--license",
        metavar="NAME",
        help="for the card, as the hub calls it; left out: that of timm's weights that the run started from, or none",
    )
    add("--push", metavar="OWNER/NAME", help="new repository on the Hugging Face hub to upload the folder to")
    add("--private", action="store_true", help="only its owners see the repository")

    def work() -> None:
        options = parser.parse(argv)
        if options.private and not options.push:
            raise ValueError("--private has no effect without --push")
        refuse_output("--output", options.output)
        api = HfApi(library_name="moh_vision", library_version=__version__)
        if options.push:
            check_hub(api, options.push)
        library, weights = publish(options.run, options.output, options.push, options.license)
        say(f"{options.output}: for {library}, weights of {weights}")
        if options.push:
            say(f"uploaded: {push(api, options.push, options.output, options.private)}")

    return exit_code("publish", work)


if __name__ == "__main__":
    raise SystemExit(main())
