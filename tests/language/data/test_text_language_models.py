from collections import Counter

import numpy as np
import pytest
import torch

from moh_vision.language.config import TextDataConfig
from moh_vision.language.data.batches import load_batches
from moh_vision.language.data.blocks import CausalWindows, MaskedBlocks, mask_tokens
from moh_vision.language.data.inputs import INPUTS, CausalInputs
from moh_vision.language.data.tokens import Tokens, write_store
from moh_vision.language.data.vocabulary import BOS, EOS, MASK, PAD, UNK, train_vocabulary
from tests.support.refusals import refuse
from tests.support.small_text import write_pairs, write_plain

WORDS = [f"w{i}" for i in range(50)]


def running_text(folder, lines, mask, skip_empty):
    vocabulary = train_vocabulary([" ".join(WORDS)], mask=mask)
    if skip_empty:
        lines = filter(None, lines)
    write_store(folder / "tokens", lines, vocabulary, "lines")
    return vocabulary, Tokens([folder / "tokens"])


def some_lines(count, seed=0):
    rng = np.random.default_rng(seed)
    return ["" if n == 0 else " ".join(rng.choice(WORDS, n)) for n in rng.integers(0, 30, count)]


def test_masking_rates():
    """15 % chosen; of those 80 % mask, 10 % random, 10 % kept: each within four standard deviations."""
    size = 1000
    blocks = 400
    ids = np.concatenate([[BOS], np.random.default_rng(0).integers(5, size, 126), [EOS]])
    chosen = masked = kept = 0
    anything = Counter()
    for position in range(blocks):
        inputs, labels = mask_tokens(ids, 7, position, size)
        at = labels != -100
        assert (
            not at[0]
            and not at[-1]
            and (labels[at] == ids[at]).all()
            and (inputs[~at] == ids[~at]).all()
        )
        chosen += at.sum()
        masked += (inputs[at] == MASK).sum()
        kept += (inputs[at] == ids[at]).sum()
        anything.update(inputs[at & (inputs != MASK) & (inputs != ids)].tolist())
    total = blocks * 126
    assert within(chosen, total, 0.15)
    assert (
        within(masked, chosen, 0.8)
        and within(kept, chosen, 0.1)
        and within(anything.total(), chosen, 0.1)
    )
    assert min(anything) >= 5 and max(anything) < size and len(anything) > 0.4 * anything.total()
    assert (
        mask_tokens(ids, 8, 0, size)[1] != mask_tokens(ids, 7, 0, size)[1]
    ).any()  # of another seed
    assert max(anything) > 0.95 * size and min(anything) < 0.05 * size


def within(count, total, prob):
    return abs(count - total * prob) < 4 * (total * prob * (1 - prob)) ** 0.5


def test_something_is_always_predicted_and_never_a_special_token():
    for position in range(200):
        inputs, labels = mask_tokens(
            np.array([BOS, 9, EOS, UNK, EOS, PAD]), 0, position, 50, prob=0.02
        )
        at = np.flatnonzero(labels != -100)
        assert len(at) >= 1 and set(at) <= {1, 3}
    assert (mask_tokens(np.array([BOS, EOS]), 0, 0, 50)[1] == -100).all()


def test_blocks_hold_the_whole_text_once(tmp_path):
    lines = some_lines(60)
    vocabulary, tokens = running_text(tmp_path, lines, mask=True, skip_empty=True)
    stream = [i for line in lines if line for i in [*(vocabulary.encode([line])[0]), EOS]]
    blocks = MaskedBlocks(tokens, 16, vocabulary, seed=0)
    found = []
    for n in range(len(blocks)):
        inputs, labels = blocks[n, n]
        assert inputs[0] == BOS and (len(inputs) == 16 or n == len(blocks) - 1)
        found += np.where(labels == -100, inputs, labels)[1:].tolist()
    assert found == stream[: len(found)] and stream[len(found) :] in ([], [EOS])
    last = len(blocks) - 1
    batch = blocks.collate([blocks[0, 0], blocks[1, last]])
    real = len(blocks[0, last][0])
    assert real < 16 and batch["attention_mask"].tolist() == [
        [1] * 16,
        [1] * real + [0] * (16 - real),
    ]
    assert (batch["input_ids"][1, real:] == PAD).all() and (batch["labels"][1, real:] == -100).all()
    assert (
        all(v.dtype == torch.int64 and v.shape == (2, 16) for v in batch.values())
        and len(batch) == 3
    )


def test_a_last_end_of_line_is_no_block_of_its_own(tmp_path):
    vocabulary, tokens = running_text(
        tmp_path, ["w1 w2 w3 w4 w5 w6"], mask=True, skip_empty=True
    )  # 7 with eos
    assert len(MaskedBlocks(tokens, 4, vocabulary, 0)) == 2  # 3 + 3, and the eos left out
    assert len(MaskedBlocks(tokens, 5, vocabulary, 0)) == 2  # 4 + 3
    assert len(MaskedBlocks(tokens, 128, vocabulary, 0)) == 1
    unmasked = train_vocabulary(["a"])
    refuse(
        f"data.tokenizer {unmasked.where} <mask> masked",
        lambda: MaskedBlocks(tokens, 16, unmasked, 0),
    )


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A function that opens the inputs of a task, or of two sources of different length."""
    folder = tmp_path_factory.mktemp("texts")
    write_plain(folder)
    write_plain(folder / "more", train=90, seed=1)
    write_pairs(folder)
    sources = [dict(root=".", weight=2), dict(root="more", weight=3)]
    options = dict(mlm=dict(merges=9), clm=dict(words=0), mixture=dict(words=0, mixture=sources))
    options["mt"] = dict(source="de", target="en", max_length=30, max_tokens=60, merges=9)

    def opened(task):
        data = TextDataConfig(root=str(folder), block=16, **options[task])
        return INPUTS.get(task, CausalInputs)(data, str(folder / "cache"), 3)

    return opened


@pytest.mark.parametrize("task", ["mt", "mlm", "clm", "mixture"])
def test_streams_are_the_same_for_processes_workers_and_resumes(texts, task):
    text = texts(task)

    def stream(workers=0, world=1, accumulation=1, start=0, **rank):
        """Rows of each micro-batch; a step of a translation is as many whole ones as there are."""
        stop = 60
        if task == "mt":
            stop //= world * accumulation
        options = dict(
            rank=0, batch_size=4, world=world, accumulation=accumulation, start=start, stop=stop
        )
        batches = load_batches(text.train, text.sampler(**{**options, **rank}), workers)
        return [list(zip(*(rows.tolist() for rows in batch.values()))) for batch in batches]

    whole = stream()
    rows = [row for micro in whole for row in micro]
    assert stream(workers=2, start=11) == whole[11:] and len({str(micro) for micro in whole}) > 40
    two = [stream(rank=rank, world=2, workers=rank) for rank in range(2)]
    assert [row for micros in zip(*two) for micro in micros for row in micro] == rows
    assert [row for micro in stream(accumulation=2) for row in micro] == rows

    def scored(world):
        batches = [
            batch for rank in range(world) for batch in text.eval_batches(text.val, rank, world)
        ]
        return sorted(
            [i for i in row if i != -100] for batch in batches for row in batch["labels"].tolist()
        )

    assert scored(1) == scored(3) and len(scored(1)) == len(text.val)  # with the same masks


@pytest.mark.parametrize("extra", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("width, stride", [(16, 4), (16, 16), (5, 2), (7, 1), (16, 15)])
def test_windows_predict_each_token_once_with_the_context_they_promise(
    tmp_path, width, stride, extra
):
    lines = [*some_lines(8), "w1 " * extra]
    vocabulary, tokens = running_text(tmp_path, lines, mask=False, skip_empty=False)
    stream = [i for line in lines for i in [*(vocabulary.encode([line])[0]), EOS]]
    before = [EOS] + stream
    windows = CausalWindows(tokens, width, stride, vocabulary)
    predicted = []
    for n in range(len(windows)):
        inputs, labels = windows[0, n]
        assert len(inputs) == len(labels) == width
        for position in np.flatnonzero(labels != -100):
            t = len(predicted)  # in the order of the stream, none left out, none twice
            assert labels[position] == stream[t]
            context = inputs[: position + 1].tolist()
            assert context == before[t + 1 - len(context) : t + 1]
            if n == 0:
                assert position == t
            else:
                assert width - stride <= position < width
            predicted.append(labels[position])
    assert predicted == stream


def test_causal_mistakes(tmp_path):
    vocabulary, tokens = running_text(tmp_path, ["w1 w2 w3"], mask=False, skip_empty=False)
    assert len(CausalWindows(tokens, 4, 4, vocabulary)) == 1
    refuse(f"{tmp_path}/tokens 4 tokens block 5", lambda: CausalWindows(tokens, 5, 5, vocabulary))
