"""Scores of language models: perplexity, BLEU, suites of lm_eval, gates."""
