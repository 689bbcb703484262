"""A small random LLaMA with a tokenizer of bytes, and files of evaluation tasks."""

import json

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import moh_vision

QUESTIONS = [
    dict(q=f"what is {i} and {i * i}?", a=["one", "two or so", "three hundred"], l=i % 3)
    for i in range(7)
]


def write_model(folder, eos=True, vocab=258, budget=None):
    """Save a LLaMA and its tokenizer to `folder` and return its path.

    eos: whether the tokenizer names its special tokens. budget: convert to MoH with this share of heads; None: dense.
    """
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    names = {}
    if eos:
        names = dict(bos_token="<s>", eos_token="</s>")
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if budget is not None:
        model = moh_vision.convert(model, head_budget=budget, router="query_norm")
    model.save_pretrained(folder)
    return str(folder)


def write_task(folder, name, rows, body, data=None):
    """Write NAME.yaml, a task with `body`, and its data, and return `folder`; `data`: a file to use in place of `rows`."""
    folder.mkdir(exist_ok=True)
    if data is None:
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = f"""task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{train: "{data}", test: "{data}"}}
  cache_dir: "{folder / "cache"}"
training_split: train
test_split: test
"""
    (folder / f"{name}.yaml").write_text(head + body)
    return str(folder)


CHOICE = """output_type: multiple_choice
doc_to_text: "Q: {{q}}\\nA:"
doc_to_choice: "{{a}}"
doc_to_target: l
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
GENERATE = """output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{t}}"
target_delimiter: ""
generation_kwargs: {until: ["\\n\\n\\n"], max_gen_toks: 6, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
