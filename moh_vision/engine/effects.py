"""Keys that have an effect only beside others: one table for all scripts."""

from __future__ import annotations

from fnmatch import filter as matching
from typing import Any, Dict, Iterator, List, Optional, Tuple

from moh_vision.engine.optimizers import takes

TEXT = ("mt_", "mlm_", "clm_")  # how names of text models begin


def routers(name: str, router: Optional[str], kwargs: Optional[dict], convert: Optional[dict] = None) -> str:
    """The router that these keys of the model choose; for a text model, a string that contains all its routers."""
    if name.startswith(TEXT):
        # Only the files of model.pretrained tell whether it was saved with routers.
        return f"{name.replace('nobcd', 'mae')} {kwargs} {'query_norm' if name == 'clm_pretrained' else ''}"
    if name == "pretrained":  # without convert only its files tell
        return (convert or {}).get("router") or "moh"
    return router or ("dense" if name.startswith(("dit_", "transnext_")) else "moh")


def has_budget(name, router, kwargs, convert) -> bool:
    chosen = routers(name, router, kwargs, convert)
    if name.startswith(TEXT):
        return any(r in chosen for r in ("moh", "moa", "query_norm"))
    return chosen not in ("dense", "mae")


def learns_gates(name, router, kwargs, convert, router_kwargs) -> bool:
    soft = (router_kwargs or (convert or {}).get("router_kwargs") or {}).get("mode", "soft") == "soft"
    return soft and "mae" in routers(name, router, kwargs, convert).replace("uni_mae", "")


def some(*values) -> bool:
    return any(values)


def both(*values) -> bool:
    return all(values)


def is_not(*tasks: str):
    """Condition: the name has none of these prefixes. Unknown names are refused when the model is built."""
    return lambda name: not name.startswith(tasks)


MODEL = "model.name model.router model.kwargs model.convert"

# (keys, the keys that decide, their values -> whether the first have an effect, what they need)
# A * in a key stands for the rest of its name. The value of a key that a script does not have is None.
NEEDS = (
    ("model.head_budget budget_range", MODEL, has_budget, "a model that routes its heads"),
    ("model.scope", MODEL, lambda *m: routers(*m) != "dense", "a model that routes its heads"),
    ("model.convert", "model.pretrained", some, "model.pretrained"),
    ("model.router model.scope model.executor model.router_kwargs model.embed_dim model.depth model.num_heads",
     "model.pretrained", lambda source: not source, "model.pretrained left out; model.convert takes what moh_vision.convert does"),
    ("balance_weight", MODEL, lambda *m: any(r in routers(*m) for r in ("moh", "query_norm")),
     "router moh or query_norm"),
    ("moa_balance_weight z_weight", MODEL, lambda *m: "moa" in routers(*m), "router moa"),
    ("block_descent.*", f"{MODEL} model.router_kwargs", learns_gates, "router mae with mode soft"),
    ("block_descent.period", "block_descent.mode", lambda mode: mode == "bcd", "block_descent.mode bcd"),
    ("block_descent.period", "train_only", lambda which: which != "gates", "train_only all or gates_and_outputs"),
    ("calibrate_images", "init_from model.pretrained", some, "init_from or model.pretrained"),
    ("optim.name optim.lr optim.weight_decay optim.betas optim.eps optim.momentum optim.schedule optim.warmup_* "
     "optim.min_lr optim.layer_decay", "train_only", lambda which: which != "gates",
     "train_only all or gates_and_outputs"),
    ("optim.clip_norm", "train_only block_descent.mode", lambda which, mode: which != "gates" or mode == "joint",
     "train_only all or gates_and_outputs, or block_descent.mode joint"),
    ("optim.min_lr", "optim.schedule", lambda schedule: schedule != "constant", "an optim.schedule that falls"),
    ("optim.warmup_lr", "optim.warmup_steps optim.warmup_epochs", some, "a warm-up: optim.warmup_steps"),
    ("optim.cooldown_epochs", "optim.epochs", some, "optim.epochs"),
    ("optim.betas", "optim.name", lambda name: takes(name, "betas"), "an optim.name with two betas, such as adamw"),
    ("optim.eps", "optim.name", lambda name: takes(name, "eps"), "an optim.name with eps, such as adamw"),
    ("optim.momentum", "optim.name", lambda name: takes(name, "momentum"), "an optim.name with momentum, such as sgd"),
    ("ema.warmup", "ema.decay", some, "ema.decay above 0"),
    ("data.stream data.samples", "data.exact_order", lambda exact: exact is False, "data.exact_order false"),
    ("data.shuffle_shards data.repeats calibrate_images", "data.exact_order", lambda exact: exact is not False,
     "data.exact_order true"),
    ("data.crop_scale data.auto_augment data.color_jitter data.erase_*", "data.augment",
     lambda augment: augment == "imagenet", "data.augment imagenet"),
    ("data.erase_mode", "data.erase_prob", some, "data.erase_prob above 0"),
    # timm leaves it out beside any other policy.
    ("data.color_jitter", "data.auto_augment", lambda policy: not policy or "3a" in policy,
     "data.auto_augment left out, or 3a"),
    ("mix.prob mix.mode", "mix.mixup mix.cutmix", some, "mix.mixup or mix.cutmix above 0"),
    ("mix.switch_prob", "mix.mixup mix.cutmix", both, "mix.mixup and mix.cutmix above 0"),
    ("mix.*", "mix.prob", some, "mix.prob above 0"),
    ("distill.*", "distill.teacher", some, "distill.teacher"),
    ("repa.*", "repa.teacher", some, "repa.teacher"),
    ("preview.*", "preview.every", some, "preview.every above 0"),
    ("preview.columns", "preview.classes", lambda classes: not classes, "preview.classes left out"),
    ("score.*", "score.every", some, "score.every above 0"),
    ("guide_channels cfg_interval", "cfg_scale", lambda scale: scale != 1, "a cfg_scale other than 1"),
    ("learn_sigma min_snr_gamma", "objective", lambda objective: objective != "flow", "objective noise"),
    ("flow.*", "objective", lambda objective: objective == "flow", "objective flow"),
    ("grid_columns", "grid", some, "--grid FILE"),
    ("score_split extractor inception_weights allow_biased score_file", "score", some, "--score REFERENCE"),
    ("weights", "checkpoint", lambda path: not path.endswith(".safetensors"), "the folder of a run as --checkpoint"),
    ("classes labels cfg_scale seed batch_size", "num_images", lambda number: number != 0, "num_images above 0"),
    ("data.source data.target data.target_merges data.allow_empty data.max_tokens data.max_length data.max_ratio "
     "data.share generate.*", "model.name", is_not("mlm_", "clm_"), "a model that translates, mt_*"),
    ("data.block data.eval_batch_size data.words optim.batch_size", "model.name", is_not("mt_"),
     "a language model, clm_* or mlm_*"),
    ("data.mixture data.vocab_size data.bin_dtype data.context", "model.name",
     is_not("mt_", "mlm_"), "a causal language model, clm_*"),
    ("data.mask_prob", "model.name", is_not("mt_", "clm_"), "a masked language model, mlm_*"),
    ("data.merges", "data.words", lambda words: words is None, "data.words left out"),
    ("data.merges data.target_merges data.words data.lowercase", "data.tokenizer", lambda made: not made,
     "data.tokenizer left out"),
    ("data.merges data.words data.lowercase", "data.vocab_size", lambda size: not size, "data.vocab_size left out"),
    ("patience", "eval_every", some, "eval_every above 0"),
    ("generate.length_penalty", "generate.beam", lambda beam: beam > 1, "generate.beam above 1"),
)  # fmt: skip

# What --validate-only reads, beside model.*
VALIDATION_KEYS = (
    "output", "mixed_precision", "tf32", "data.root", "data.img_size", "data.augment", "data.workers",
    "data.max_bad_fraction", "data.crop_pct", "data.crop_mode", "data.eval_batch_size",
)  # fmt: skip


def idle_keys(values: Dict[str, Any]) -> Iterator[Tuple[str, List[str], str]]:
    """Every key that has no effect beside the others, with the keys that decide and what it needs."""
    for keys, deciding, met, words in NEEDS:
        of = deciding.split()
        found = [key for pattern in keys.split() for key in matching(values, pattern) if key not in of]
        if found and not met(*map(values.get, of)):
            yield from ((key, of, words) for key in found)
