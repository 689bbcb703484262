"""What a decoding step takes where only the chosen heads' caches are read, against attention of all heads.

    python benchmarks/decode.py                    # about 5 minutes on 2 cores

One new token, 4096 cached keys, 32 heads of 128, heads drawn at random in every round, half of those that run shared:

    multi-head      32 key-value heads, heads chosen one by one
    grouped         8 key-value heads, heads chosen one by one: a key-value head is left unread only if its four are off
    whole groups    8 key-value heads, chosen as `query_norm` with group=4 does

Dense is one call of scaled_dot_product_attention over all heads. With shared key-value heads there are two ways to call
it, with enable_gqa and with the query heads of a key-value head as rows of one product; ratios are to the faster one,
whichever it is on this machine, and the other is reported beside it. Every round times all in a random order,
each on another cache (together larger than the processor's), so that a noisy machine hits all alike; reported are
medians and quartiles of the ratio, round by round. Results go to benchmarks/results/decode.json.
"""

import argparse
import itertools
import math
import os
from pathlib import Path

import torch
from timing import interleaved, machine, spread, write_report
from torch.nn import functional as F

from moh_vision.attention.executors import attend_chosen
from moh_vision.attention.executors.decode import reading

HERE = Path(__file__).parent
HEADS, WIDTH = 32, 128
KINDS = {"multi-head": (32, 1), "grouped": (8, 1), "whole groups": (8, 4)}  # key-value heads, heads chosen together
GOAL = 1.12  # times the share of the heads, where that can be reached


def draw(batch, share, group):
    """Which heads run, bool [B, 1, H]: the first half of them shared, the others drawn anew for every sequence."""
    candidates = HEADS // group
    active = round(share * candidates)
    shared = active // 2
    order = torch.rand(batch, candidates - shared).argsort(-1).argsort(-1)
    chosen = torch.cat([torch.ones(batch, shared, dtype=torch.bool), order < active - shared], dim=1)
    return chosen.repeat_interleave(group, 1).unsqueeze(1)


def caches(batch, groups, keys, dtype, megabytes):
    """Keys and values [B, G, M, D], as many as together fill so much memory, but at least two."""
    shape = (batch, groups, keys, WIDTH)
    count = max(2, math.ceil(megabytes * 2**20 / (2 * math.prod(shape) * dtype.itemsize)))
    return [(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)) for _ in range(count)]


@torch.inference_mode()
def measure(kind, batch, share, keys, dtype, rounds, megabytes):
    """({way: [seconds]}, share of the key-value heads that was read), after two rounds that do not count."""
    groups, group = KINDS[kind]
    stored = caches(batch, groups, keys, dtype, megabytes)
    q = torch.randn(batch, HEADS, 1, WIDTH, dtype=dtype)
    ways = {"dense": lambda k, v, active: F.scaled_dot_product_attention(q, k, v, enable_gqa=groups < HEADS)}
    if groups < HEADS:
        rows = q.view(batch, groups, HEADS // groups, WIDTH)
        ways["dense by rows"] = lambda k, v, active: F.scaled_dot_product_attention(rows, k, v)
    ways["chosen"] = lambda k, v, active: attend_chosen(q, k, v, None, active)
    turn, state, read = itertools.cycle(stored), {}, []

    def choose(number):
        state["active"] = draw(batch, share, group)
        read.append(len(reading(state["active"], groups).heads) / (batch * groups))

    steps = {way: lambda attend=attend: attend(*next(turn), state["active"]) for way, attend in ways.items()}
    return interleaved(steps, rounds, before=choose), sum(read) / len(read)


def case(kind, batch, share, keys, dtype, threads, rounds, megabytes):
    torch.set_num_threads(threads)
    times, read = measure(kind, batch, share, keys, getattr(torch, dtype), rounds, megabytes)
    dense = min((way for way in times if way != "chosen"), key=lambda way: times[way].median().item())
    entry = dict(kind=kind, batch=batch, share=share, dtype=dtype, threads=threads, read=round(read, 3), to=dense)
    entry["dense_milliseconds"] = round(1000 * times[dense].median().item(), 3)
    entry["ratio"] = {way: spread(t / times[dense]) for way, t in times.items() if way != dense}
    if kind != "grouped" and share < 1:
        entry["goal"] = round(GOAL * share, 3)
    return entry


def line(entry):
    chosen = entry["ratio"]["chosen"]
    text = f"{entry['kind']:13} {entry['dtype']:9} {entry['threads']} threads, batch {entry['batch']}, share {entry['share']:.2f}"
    text += f"  {entry['to']:13} {entry['dense_milliseconds']:8.2f} ms  read {entry['read']:.2f}"
    text += f"  chosen {chosen['median']:.3f} [{chosen['quartiles'][0]:.3f} {chosen['quartiles'][1]:.3f}]"
    if "goal" in entry:
        text += f"  goal {entry['goal']:.2f} " + ("met" if chosen["median"] <= entry["goal"] else "missed")
    for way, ratio in entry["ratio"].items():
        if way != "chosen":
            text += f"  {way} {ratio['median']:.2f}"
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 0.75, 1.0])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--keys", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--megabytes", type=int, default=1024, help="of caches in turn, more than the processor keeps")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "decode.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    report = dict(machine=machine(), load_before=os.getloadavg(), heads=HEADS, head_dim=WIDTH, keys=args.keys)
    report.update(rounds=args.rounds, cases=[])
    for threads in args.threads:
        for dtype in args.dtypes:
            for kind in args.kinds:
                for batch in args.batches:
                    for share in args.shares:
                        entry = case(kind, batch, share, args.keys, dtype, threads, args.rounds, args.megabytes)
                        report["cases"].append(entry)
                        print(line(entry), flush=True)
    write_report(args.output, report)


if __name__ == "__main__":
    main()
