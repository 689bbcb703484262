"""Text: where it is (`sources`), its tokens (`vocabulary`, `token_cache`), and what a step sees of them.

`translation` and `buckets` are for pairs, `masked` and `causal` for plain text; `stream` runs any of them through a loader.
"""
