"""Text: its files (`sources`), tokens (`vocabulary`, `tokens`) and training items (`inputs`).

`translation` is for pairs, `blocks` and `mixture` for plain text, `batches` for both.
"""
