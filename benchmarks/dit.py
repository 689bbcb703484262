"""Speed and memory of MoH-DiT against dense DiT: training steps and a sampling run, in one interleaved run.

    python benchmarks/dit.py                              # about 25 minutes on 2 cores
    python benchmarks/dit.py --parts sample --rounds 10   # fewer steps

All models have the same shape (DiT-S/2 on 32 x 32 x 3: 256 tokens, as the paper's latents have) and random weights. Every
round runs one training step, or one denoising step of the same 50-step run, of every model in turn, in alternating order,
so that a noisy machine hits all alike; reported are the medians and quartiles of the ratio to dense, round by round.

    token          heads per token, as in Jin 2024
    condition      heads per image, chosen from timestep and class
    timestep       heads per image, chosen from the timestep alone: one set for the batch

`bound` is the ratio of the model's multiplications if what a chosen head needs were free of everything else. Peak memory is
that of a process of its own that does three training (or denoising) steps, less what it held before. Results go to
benchmarks/results/dit.json.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import timm
import torch
from attention import machine, write_report

import moh_vision
from moh_vision.diffusion import HybridLoss, make_scheduler
from moh_vision.diffusion.task import DiffusionTask

HERE = Path(__file__).parent
SIZE, CHANNELS, CLASSES = 32, 3, 10
BUDGETS = {"0.75": None, "0.5": 0.5}  # None: as released
MODELS = {
    "dense": ("dit_small_patch2", {}),
    **{f"token {s}": ("moh_dit_small_patch2_75", dict(scope="token", budget=b)) for s, b in BUDGETS.items()},
    **{
        f"{by} {s}": ("moh_dit_small_patch2_75", dict(scope="sample", route_by=by, budget=b))
        for by in ("condition", "timestep")
        for s, b in BUDGETS.items()
    },
}


def build(name):
    model, options = MODELS[name]
    options = dict(options)
    budget = options.pop("budget", None)
    if budget is not None:
        options["head_budget"] = budget
    torch.manual_seed(0)
    model = timm.create_model(model, img_size=SIZE, in_chans=CHANNELS, num_classes=CLASSES, **options)
    for block in [*model.blocks, model.final_layer]:  # a new DiT is the identity, whose routers see no difference
        torch.nn.init.normal_(block.adaLN_modulation[1].weight, std=0.02)
    return model


def bound(model, batch_tokens):
    """Multiplications of the blocks over those with all heads: per token queries and output are skipped, per image all."""
    kept = total = 0.0
    C, N = model.config.hidden_size, batch_tokens
    for layer in moh_vision.head_budget(model)["layers"]:
        share = layer["active"] / layer["heads"]
        attention, mlp = 4 * C * C + 2 * N * C, 8 * C * C
        skipped = attention if model.config.scope == "sample" else 2 * C * C + 2 * N * C
        total += attention + mlp
        kept += attention + mlp - (1 - share) * skipped
    return kept / total


def training_step(model, batch):
    task = DiffusionTask(model.train(), 0.01, HybridLoss())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images, noise = torch.randn(2, batch, CHANNELS, SIZE, SIZE)
    labels, timesteps = torch.randint(CLASSES, (batch,)), torch.randint(1000, (batch,))

    def step(_):
        optimizer.zero_grad()
        task(images=images, noise=noise, labels=labels, timesteps=timesteps)["loss"].backward()
        optimizer.step()

    return step


def denoising_step(model, batch, steps=50):
    model.eval()
    scheduler = make_scheduler("ddim", steps, True, clip=True)
    labels = torch.arange(batch) % CLASSES
    state = {}

    @torch.no_grad()
    def step(number):
        number %= steps
        if number == 0:
            state["x"] = torch.randn(batch, CHANNELS, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
        t = scheduler.timesteps[number]
        noise = model(state["x"], t.expand(batch), labels).sample[:, :CHANNELS]
        state["x"] = scheduler.step(noise, t, state["x"]).prev_sample

    return step


PARTS = {"train": training_step, "sample": denoising_step}


def interleaved(steps, rounds):
    """{name: step} -> {name: [seconds]}, after two rounds that do not count."""
    names, times = list(steps), {name: [] for name in steps}
    for round_ in range(-2, rounds):
        for name in names if round_ % 2 == 0 else reversed(names):
            begin = time.perf_counter()
            steps[name](max(round_, 0))
            if round_ >= 0:
                times[name].append(time.perf_counter() - begin)
    return times


def summary(times, batch):
    base = torch.tensor(times["dense"], dtype=torch.float64)
    result = {}
    for name, seconds in times.items():
        seconds = torch.tensor(seconds, dtype=torch.float64)
        low, middle, high = (seconds / base).quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
        result[name] = dict(
            ratio=round(middle, 3),
            quartiles=[round(low, 3), round(high, 3)],
            ratio_of_sums=round((seconds.sum() / base.sum()).item(), 3),
            images_per_s=round(batch / seconds.median().item(), 2),
            rounds=len(seconds),
        )
    return result


def resident(which):
    """MiB of memory that this process holds (VmRSS) or has held at most (VmHWM); Linux only."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which))
    return int(line.split()[1]) / 1024


def peak_memory(part, name, batch):
    """MiB, measured in a process of its own."""
    command = [sys.executable, __file__, "--memory-of", name, "--parts", part, "--batch", str(batch)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(out.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, help="default: 20 training steps, all 50 denoising steps")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "dit.json")
    parser.add_argument("--memory-of", choices=list(MODELS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        step = PARTS[args.parts[0]](build(args.memory_of), args.batch)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = resident("VmHWM")
        for number in range(3):
            step(number)
        print(resident("VmHWM") - before)
        return

    names = ["dense", *(n for n in args.models if n != "dense")]
    report = dict(machine=machine(), threads=torch.get_num_threads(), batch=args.batch, load_before=os.getloadavg())
    for part in args.parts:
        models = {name: build(name) for name in names}
        rounds = args.rounds or dict(train=20, sample=50)[part]
        result = summary(interleaved({n: PARTS[part](m, args.batch) for n, m in models.items()}, rounds), args.batch)
        print(f"{part:16}{'share':>7}{'bound':>7}{'time / dense':>24}{'img/s':>8}{'peak MiB':>10}")
        for name, row in result.items():
            row["share"] = round(moh_vision.head_budget(models[name])["share"], 3)
            row["bound"] = round(bound(models[name], (SIZE // 2) ** 2), 3)
            row["peak_memory_mib"] = round(peak_memory(part, name, args.batch))
            low, high = row["quartiles"]
            spread = f"{row['ratio']:.3f} ({low:.3f} to {high:.3f})"
            print(
                f"{name:16}{row['share']:7.2f}{row['bound']:7.2f}{spread:>24}{row['images_per_s']:8.2f}{row['peak_memory_mib']:10}",
                flush=True,
            )
        report[part] = result
    write_report(args.output, report)


if __name__ == "__main__":
    main()
