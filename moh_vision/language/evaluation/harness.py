"""The lm-evaluation-harness' wrapper of a causal language model. This module needs its package, lm_eval."""

from lm_eval.models.huggingface import HFLM

from moh_vision.language.data.vocabulary import BASE_SPECIALS


class Harness(HFLM):
    """Scores as HFLM does, but for whole texts by a model whose vocabulary is our own."""

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text behind its start token.

        The harness puts a start token before a text's tokens. Tokenizers of our own do so too, and the second one would
        be scored as a token of the text. Other tokenizers that do so are scored as the harness does, so that their
        scores can be compared with published ones.
        """
        first = self.tokenizer.convert_ids_to_tokens(list(range(len(BASE_SPECIALS))))
        if tuple(first) == BASE_SPECIALS:
            self.add_bos_token = False
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self.add_bos_token = None
