"""Text: its files (`sources`), tokens (`vocabulary`, `tokens`) and training items (`inputs`).

`translation` and `buckets` are for pairs, `masked`, `causal` and `mixture` for plain text.
"""
