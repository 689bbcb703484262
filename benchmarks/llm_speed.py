"""Prefill and decoding of a LLaMA-style model turned into MoH, in tokens a second, against the dense model.

    python benchmarks/llm_speed.py                     # about 4 minutes on one core
    python benchmarks/llm_speed.py --threads 1 2 --prompt 4096

Random weights: with them the queries of all heads are about as long, so every head runs for about as many tokens. Every
budget is the same in all layers ("uniform"), and half of the heads that run are shared, as `convert` has it.

    multi-head      one key-value head for every query head, heads chosen one by one
    whole groups    four query heads for every key-value head, chosen together (group=True)

Prefill is one call with the whole prompt that ends in the logits of its last token, decoding one token after another
behind it with all heads, with one of two caches: transformers' StaticCache with no room to spare, and its DynamicCache, which
copies all keys and values for every token. `auto` is what a user gets, `packed` skips heads of the prompt whether or not that
pays. Every round times all models in a random order, so that
a noisy machine hits all alike; reported are tokens a second of the median round, and the median and quartiles of the
ratio of speeds to the dense model of the same kind with the same cache, round by round. Results go to
benchmarks/results/llm_speed.json.
"""

import argparse
import os
from copy import deepcopy
from pathlib import Path

import torch
from timing import interleaved, machine, spread, write_report
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import moh_vision
from moh_vision.attention import attention_layers

HERE = Path(__file__).parent
KINDS = {"multi-head": (1, False), "whole groups": (4, True)}  # query heads of a key-value head, chosen together
EXECUTORS = ("auto", "packed")
CACHES = ("static", "dynamic")
WARM_UP = 1  # rounds of decoding that do not count; a prefill takes seconds and needs none


def models(kind, shares, args):
    """{(share, executor): model}; the dense one is (1.0, "dense")."""
    size, group = KINDS[kind]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocabulary, hidden_size=args.width, intermediate_size=args.mlp, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.heads // size, head_dim=args.head_dim,
        max_position_embeddings=2 * args.prompt, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    dense = LlamaForCausalLM(config).eval()
    result = {(1.0, "dense"): dense}
    for share in shares:
        for executor in EXECUTORS:
            model = moh_vision.convert(
                deepcopy(dense), head_budget=f"uniform:{share}", router="query_norm", executor=executor, group=group
            )
            result[share, executor] = model.eval()
    return result


def new_cache(name, model, room):
    if name == "static":
        return StaticCache(config=model.config, max_cache_len=room)
    return DynamicCache(config=model.config)


@torch.inference_mode()
def measure(kind, args):
    """Entries of one kind of model on the present number of threads."""
    every = models(kind, args.shares, args)
    tokens = args.tokens * (args.rounds + WARM_UP)  # that each decodes in all
    prompt = torch.randint(2, args.vocabulary, (1, args.prompt))
    caches = {}

    def prefill(key):
        caches[key] = new_cache("static", every[key], args.prompt + tokens)
        every[key](prompt, past_key_values=caches[key], logits_to_keep=1)

    def decode(key, name):
        for token in torch.randint(2, args.vocabulary, (args.tokens, 1, 1)):
            every[key](token, past_key_values=filled[key, name])

    def entries(phase, times, count, cache=None):
        for key, seconds in times.items():
            share, executor = key
            entry = dict(phase=phase, cache=cache, kind=kind, share=share, executor=executor)
            entry["share_of_heads"] = 1.0 if executor == "dense" else active_share(every[key])
            entry["tokens_per_second"] = round(count / seconds.median().item(), 2)
            entry["speed_to_dense"] = spread(times[1.0, "dense"] / seconds)
            yield entry

    jobs = {key: lambda key=key: prefill(key) for key in every}
    found = list(entries("prefill", interleaved(jobs, args.rounds, warm_up=0), args.prompt))
    filled = {}
    for key, cache in caches.items():
        filled[key, "static"] = cache
        for name in args.caches:
            if name != "static":
                filled[key, name] = new_cache(name, every[key], None)
                for i, layer in enumerate(cache.layers):
                    filled[key, name].update(layer.keys[:, :, : args.prompt], layer.values[:, :, : args.prompt], i)
    jobs = {(key, name): lambda key=key, name=name: decode(key, name) for name in args.caches for key in every}
    times = interleaved(jobs, args.rounds, warm_up=WARM_UP)
    for name in args.caches:
        found += entries("decode", {key: times[key, name] for key in every}, args.tokens, name)
    return found


def active_share(model):
    budgets = [layer.budget for layer in attention_layers(model)]
    return sum(b.active for b in budgets) / sum(b.heads for b in budgets)


def line(entry):
    text = f"{entry['threads']} threads  {entry['phase']:8} {entry['cache'] or '':8} {entry['kind']:13}"
    text += f"{entry['executor']:7} {entry['share_of_heads']:.2f}  {entry['tokens_per_second']:9.1f} tokens/s"
    if entry["executor"] != "dense":
        ratio = entry["speed_to_dense"]
        text += f"  x {ratio['median']:.2f} [{ratio['quartiles'][0]:.2f} {ratio['quartiles'][1]:.2f}]"
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.75, 0.5])
    parser.add_argument("--caches", nargs="+", default=list(CACHES), choices=CACHES)
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=8, help="decoded in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--mlp", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "llm_speed.json")
    args = parser.parse_args()
    names = ("prompt", "tokens", "layers", "width", "heads", "head_dim", "mlp", "vocabulary")
    sizes = {name: getattr(args, name) for name in names}
    report = dict(
        machine=machine(), load_before=os.getloadavg(), rounds=args.rounds, dtype="float32", **sizes, cases=[]
    )
    for threads in args.threads:
        torch.set_num_threads(threads)
        for kind in args.kinds:
            for entry in measure(kind, args):
                report["cases"].append(dict(threads=threads, **entry))
                print(line(report["cases"][-1]), flush=True)
    write_report(args.output, report)


if __name__ == "__main__":
    main()
