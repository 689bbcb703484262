"""Text: where it is (`sources`), its tokens (`vocabulary`, `token_cache`), and what a step sees of them (`inputs`).

`translation` and `buckets` are for pairs, `masked`, `causal` and `mixture` for plain text; `loader` loads batches of
any of them.
"""
