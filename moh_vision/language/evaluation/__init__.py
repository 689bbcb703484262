"""Scores of language models: perplexity, BLEU, the suites of lm_eval, the use of gates."""
