"""What MAE's block coordinate descent costs: G and F steps of a translation model against steps of the dense one.

    python benchmarks/mae_steps.py                    # about 5 minutes on 2 cores

Every round takes one batch through every kind of step in a random order, so that a noisy machine hits all
alike; reported are medians and quartiles of the ratio to the dense step, round by round. Over five epochs, of which the first
has G steps too, MAE takes (G + 5 F) / 5; Peng 2020 (section 3) says about 1.2 times the dense model. Results go to
benchmarks/results/mae_steps.json.
"""

import argparse
import os
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from timing import interleaved, machine, spread, write_report

from moh_vision.engine.block_descent import BlockDescent
from moh_vision.engine.config import BlockDescentConfig
from moh_vision.engine.step import Updater
from moh_vision.language.models.create import create_text_model
from moh_vision.language.task import LanguageTask
from moh_vision.models.mae import mae_routers

HERE = Path(__file__).parent
SMALL = dict(hidden_size=256, intermediate_size=1024, encoder_layers=3, decoder_layers=3)
# preset, and which of the descent's epochs: 0 has G and F, 1 has F alone
STEPS = {
    "dense": ("mt_transformer_base", "bcd", 1),
    "UNI-MAE-7": ("mt_uni_mae_7", "bcd", 1),
    "NoBCD": ("mt_nobcd", "joint", 1),
    "F": ("mt_mae_7", "bcd", 1),
    "G and F": ("mt_mae_7", "bcd", 0),
}


class Training:
    """A model with its optimisers."""

    def __init__(self, preset, mode, words):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        model = create_text_model(preset, vocab_size=words, **SMALL)
        self.descent = BlockDescent(accelerator, model, mae_routers(model), False, BlockDescentConfig(mode))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        self.descent.prepare(LanguageTask(model, 0.01, 0.1).train(), optimizer)
        self.accelerator, self.updater = accelerator, Updater(accelerator, clip_norm=0.0)

    def step(self, number, epoch, batch):
        for phase in self.descent.phases(epoch, [batch]):
            losses = [phase.task(**next(phase.batches))]
            self.accelerator.backward(losses[0]["loss"])
            phase.update(self.updater, number, losses)


def make_batch(words, sentences, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    source, target = (torch.randint(5, words, (sentences, tokens), generator=generator) for _ in range(2))
    return dict(
        input_ids=source, attention_mask=torch.ones_like(source), decoder_input_ids=target, labels=target.roll(-1, 1)
    )


def measure(rounds, words, sentences, tokens):
    """{kind of step: [seconds]}, after two rounds that do not count."""
    trainings = {}
    for preset, mode, _ in STEPS.values():
        trainings.setdefault(preset, Training(preset, mode, words))
    state = {}

    def draw(number):
        state.update(number=max(number, 0), batch=make_batch(words, sentences, tokens, number))

    def step(preset, epoch):
        trainings[preset].step(state["number"], epoch, state["batch"])

    steps = {name: partial(step, preset, epoch) for name, (preset, _, epoch) in STEPS.items()}
    return interleaved(steps, rounds, before=draw)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--words", type=int, default=8000)
    parser.add_argument("--sentences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "mae_steps.json")
    args = parser.parse_args()
    report = dict(
        machine=machine(), threads=torch.get_num_threads(), model=SMALL, load_before=os.getloadavg(), rounds=args.rounds
    )
    report.update(words=args.words, sentences=args.sentences, tokens=args.tokens)
    times = measure(args.rounds, args.words, args.sentences, args.tokens)
    times["MAE-7, five epochs"] = (times["G and F"] + 4 * times["F"]) / 5
    report["dense_seconds"] = round(times["dense"].median().item(), 4)
    report["to dense"] = {name: spread(seconds / times["dense"]) for name, seconds in times.items()}
    for name, ratio in report["to dense"].items():
        print(f"{name:20} {ratio['median']:6.3f} ({ratio['quartiles'][0]:.3f} to {ratio['quartiles'][1]:.3f})")
    write_report(args.output, report)


if __name__ == "__main__":
    main()
