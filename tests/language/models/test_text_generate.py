"""generate() with its cache against decoding that computes everything anew for every word."""

import pytest
import torch

from moh_vision.language.models.cache import DecoderLayerCache
from tests.support.refusals import one_line
from tests.support.text_tiny import ATTENTIONS, VOCAB, tiny, words

ROUTED = sorted(ATTENTIONS)
# In evaluation uni_mae is as dense, and moa_bias nearly as moa.
SEARCHED = [name for name in ROUTED if name not in ("uni_mae", "moa_bias")]
EOS = 2


def next_log_probs(model, source, prefixes):
    """log p of the word after each prefix of one sentence, without a cache: [prefixes, V]."""
    ids = torch.tensor(prefixes)
    if source is None:
        return model(ids).logits[:, -1]
    return model(input_ids=source.expand(len(ids), -1), decoder_input_ids=ids).logits[:, -1]


def beam_search(model, source, prefix, steps, beams, length_penalty):
    """The textbook's: a hypothesis is finished with eos; stop with as many finished ones as beams. One beam is greedy."""
    running = [(0.0, list(prefix))]
    finished = []
    for step in range(1, steps + 1):
        candidates = []
        hypotheses = [hypothesis for _, hypothesis in running]
        following = next_log_probs(model, source, hypotheses).tolist()
        for (score, hypothesis), log_probs in zip(running, following):
            for word, log_p in enumerate(log_probs):
                candidates.append((score + log_p, [*hypothesis, word]))
        candidates.sort(key=lambda c: -c[0])
        running = []
        for rank, (score, hypothesis) in enumerate(candidates[: 2 * beams]):
            if hypothesis[-1] == EOS or step == steps:
                if rank < beams:
                    finished.append((score / step**length_penalty, hypothesis))
            elif len(running) < beams:
                running.append((score, hypothesis))
        if len(finished) >= beams:
            break
    return max(finished, key=lambda f: f[0])


def trimmed(row):
    """Up to the first eos. (After it transformers' beam search writes eos again, not padding, where padding is word 0.)"""
    row = row.tolist()
    if EOS in row:
        return row[: row.index(EOS) + 1]
    return row


def sentences(model):
    """Sources of unequal length for translation, starts of one length for language models."""
    if model.config.is_encoder_decoder:
        source = words(3, 7)
        mask = torch.ones(3, 7, dtype=torch.long)
        mask[1, 4:] = 0
        mask[2, 2:] = 0
        source = source * mask
        alone = [(source[b : b + 1, : mask[b].sum()], [1]) for b in range(3)]
        return dict(input_ids=source, attention_mask=mask), alone
    start = words(3, 3)
    return dict(input_ids=start), [(None, row.tolist()) for row in start]


def likes_to_end(model, bonus=2.0):
    """Random weights seldom say eos: raise it, so that hypotheses end at different lengths."""
    head = model.log_probs

    def log_probs(hidden):
        lifted = head(hidden).clone()
        lifted[..., EOS] += bonus
        lifted[..., 0] = -1e4  # padding is never said
        return lifted.log_softmax(-1)

    model.log_probs = log_probs
    return model


@pytest.mark.parametrize("preset", ["mt_transformer_base", "clm_wt103_base"])
@pytest.mark.parametrize("attention", SEARCHED)
def test_greedy_and_beam_search(preset, attention, monkeypatch):
    model = likes_to_end(tiny(preset, attention))
    inputs, alone = sentences(model)
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False, use_cache=True)
    slow = model.generate(**inputs, max_new_tokens=8, do_sample=False, use_cache=False)
    assert torch.equal(out, slow)
    for row, (source, prefix) in zip(out, alone):
        assert trimmed(row) == beam_search(model, source, prefix, 8, 1, 0.0)[1]
    moves = []
    reorder = DecoderLayerCache.reorder_cache

    def note_and_reorder(cache, rows):
        moves.append(rows)
        return reorder(cache, rows)

    monkeypatch.setattr(DecoderLayerCache, "reorder_cache", note_and_reorder)
    settings = dict(
        max_new_tokens=6, num_beams=3, early_stopping=True, length_penalty=0.6, do_sample=False
    )
    out = model.generate(**inputs, **settings, return_dict_in_generate=True, output_scores=True)
    assert any(not torch.equal(rows, torch.arange(9)) for rows in moves)  # beams did change places
    assert torch.equal(out.sequences, model.generate(**inputs, **settings, use_cache=False))
    for row, score, (source, prefix) in zip(out.sequences, out.sequences_scores, alone):
        expected, hypothesis = beam_search(model, source, prefix, 6, 3, 0.6)
        assert trimmed(row) == hypothesis
        assert score.item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("attention", SEARCHED)
def test_starts_of_unequal_length_are_padded_on_the_left(attention):
    model = likes_to_end(tiny("clm_wt103_base", attention))
    starts = [[5, 6, 7, 8], [9, 10], [11]]
    ids = torch.tensor([[0] * (4 - len(s)) + s for s in starts])
    out = model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=6, do_sample=False)
    for row, start in zip(out, starts):
        assert trimmed(row)[4 - len(start) :] == beam_search(model, None, start, 6, 1, 0.0)[1]


@pytest.mark.parametrize("attention", ROUTED)
def test_words_one_by_one_equal_the_whole(attention):
    causal = tiny("clm_wt103_base", attention)
    ids = words(2, 9)
    cache = causal.new_cache()
    parts = [causal(ids[:, i:j], past_key_values=cache).logits for i, j in ((0, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(torch.cat(parts, 1), causal(ids).logits, rtol=0, atol=1e-10)
    assert cache.get_seq_length() == 9
    model = tiny("mt_transformer_base", attention)
    source = words(2, 6, seed=3)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    inputs = dict(
        encoder_outputs=model.encoder(source, mask),
        attention_mask=mask,
        past_key_values=model.new_cache(),
    )
    parts = [model(**inputs, decoder_input_ids=ids[:, n : n + 1]).logits for n in range(9)]
    whole = model(input_ids=source, attention_mask=mask, decoder_input_ids=ids).logits
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10)


def test_moa_caches_one_key_and_value_head():
    model = tiny("mt_transformer_base", "moa")
    out = model(input_ids=words(2, 7), decoder_input_ids=words(2, 5), use_cache=True)
    for layer in out.past_key_values.layers:
        words_so_far = layer.self_attention
        source = layer.cross_attention
        for tensor in (words_so_far.keys, words_so_far.values):
            assert tensor[:, :, :5].shape == (2, 1, 5, 6)
        assert source.keys.shape == source.values.shape == (2, 1, 7, 6)


def test_sampling_and_several_answers():
    model = likes_to_end(tiny("mt_transformer_base", "mae_7"))
    inputs, _ = sentences(model)
    settings = dict(max_new_tokens=6, do_sample=True, top_k=0)
    torch.manual_seed(3)
    out = model.generate(**inputs, **settings, num_return_sequences=4)
    torch.manual_seed(3)
    slow = model.generate(**inputs, **settings, num_return_sequences=4, use_cache=False)
    assert torch.equal(out, slow)
    assert out.shape[0] == 12 and len({tuple(row) for row in out.tolist()}) > 6
    beams = model.generate(
        **inputs, max_new_tokens=6, num_beams=4, num_return_sequences=2, do_sample=False
    )
    assert beams.shape[0] == 6 and (beams < VOCAB).all()


def test_a_cache_does_what_transformers_asks():
    model = tiny("clm_wt103_base", "moh")
    ids = words(2, 6)
    whole = model(ids).logits
    cache = model(ids[:, :4], use_cache=True).past_key_values
    cache.batch_repeat_interleave(2)
    model(ids.repeat_interleave(2, 0)[:, 4:6], past_key_values=cache)
    cache.crop(-2)
    assert cache.get_seq_length() == 4
    cache.batch_select_indices(torch.tensor([0, 3]))
    torch.testing.assert_close(
        model(ids[:, 4:], past_key_values=cache).logits, whole[:, 4:], rtol=0, atol=1e-10
    )
    cache.reset()
    assert cache.get_seq_length() == 0 and len(cache) == 2
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("attention", ["mae_7", "moa"])
def test_rows_of_a_cache_of_translations_change_places_with_their_sources(attention):
    model = tiny("mt_transformer_base", attention)
    source = words(3, 6)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 2 + [0] * 4])
    target = words(3, 5, seed=2)
    rows = torch.tensor([2, 0])
    first = model(
        input_ids=source, attention_mask=mask, decoder_input_ids=target[:, :3], use_cache=True
    )
    first.past_key_values.batch_select_indices(rows)
    encoded = (first.encoder_last_hidden_state[rows],)
    inputs = dict(
        encoder_outputs=encoded, attention_mask=mask[rows], past_key_values=first.past_key_values
    )
    rest = model(**inputs, decoder_input_ids=target[rows, 3:])
    whole = model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    torch.testing.assert_close(rest.logits, whole[rows, 3:], rtol=0, atol=1e-10)


def test_going_on_from_a_cache():
    model = likes_to_end(tiny("clm_wt103_base", "mae_6"), bonus=-1e3)
    start = words(2, 3)
    whole = model.generate(start, max_new_tokens=8, do_sample=False)
    first = model.generate(start, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    on = model.generate(
        first.sequences, past_key_values=first.past_key_values, max_new_tokens=4, do_sample=False
    )
    assert torch.equal(on, whole)
    with one_line("cache_implementation='static'"):
        model.generate(start, max_new_tokens=2, cache_implementation="static")
