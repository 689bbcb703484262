"""Adaptive input and softmax with shared weights (Grave 2017; Baevski and Auli 2019)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Projection(nn.Linear):
    """A linear layer whose weight is also used transposed.

    Dynamic quantisation replaces nn.Linear itself but no subclass, so it leaves this layer's weight readable.
    """


class AdaptiveVocabulary(nn.Module):
    """Embedding and softmax of a vocabulary sorted by frequency, with shared weights.

    The words are cut into bands. Band i has embeddings E_i of width C / factor^i and a projection W_i to C, and

        input    x = W_i E_i[w]
        output   log p(w) = log softmax over (band 0, clusters 1 ..) of h, for a word of band 0: E_0 h
                 log p(w) = log p(cluster i) + log softmax over band i of E_i dropout(W_i^T h), for a word of band i

    so the output of a rare band uses the projection of the input, and only the rows of the clusters belong to the
    output alone. (This also holds for Baevski and Auli's released models, where band 0 has a projection in the input
    only.) Without cutoffs there is one band without projection: an ordinary embedding tied to an ordinary softmax.

    Args:
        vocab_size, dim: V and C.
        cutoffs: first word of every band but band 0.
        factor: how many times narrower each band is.
        dropout: between the projection and the softmax of a rare band.

    Parameters: embeddings.i.weight [words of band i, C / factor^i], projections.i.weight [C, C / factor^i],
    clusters.weight [bands - 1, C].
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        cutoffs: Sequence[int] = (),
        factor: int = 4,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.edges = [0, *cutoffs, vocab_size]
        self.dim = dim
        widths = [dim // factor**band for band in range(len(self.edges) - 1)]
        self.embeddings = nn.ModuleList(
            nn.Embedding(end - start, width)
            for start, end, width in zip(self.edges, self.edges[1:], widths)
        )
        self.projections = nn.ModuleList(
            Projection(width, dim, bias=False) for width in widths if cutoffs
        )
        self.clusters = None
        if cutoffs:
            self.clusters = nn.Linear(dim, len(cutoffs), bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        """Embed word ids [B, N] -> [B, N, C]."""
        if self.clusters is None:
            return self.embeddings[0](ids)
        # On "meta" nobody knows which words are rare: embed all as band 0, which costs about the same.
        if ids.is_meta:
            return self.projections[0](self.embeddings[0](ids))
        x = None
        for band, (embedding, projection) in enumerate(zip(self.embeddings, self.projections)):
            where, words = self._inside(ids, band)
            embedded = projection(embedding(words))
            if x is None:
                x = embedded.new_zeros(*ids.shape, self.dim)
            x = x.index_put(where, embedded)
        return x

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Return log p of every word: [..., C] -> [..., V], float32 or better."""
        first, clusters = self._first(hidden)
        bands = range(1, len(self.embeddings))
        rare = [clusters[..., band - 1 : band] + self._rare(hidden, band) for band in bands]
        return torch.cat([first, *rare], dim=-1)

    def nll(self, hidden: Tensor, words: Tensor) -> Tensor:
        """Return -log p of one word per position, without computing all words: hidden [T, C], words [T] -> [T]."""
        first, clusters = self._first(hidden)
        frequent = words < self.edges[1]
        nll = -first.gather(-1, words.where(frequent, 0).unsqueeze(-1)).squeeze(-1)
        nll = nll * frequent  # [T]
        for band in range(1, len(self.embeddings)):
            (where,), index = self._inside(words, band)
            rare = self._rare(hidden[where], band).gather(-1, index.unsqueeze(-1)).squeeze(-1)
            nll = nll.index_put((where,), -(clusters[where, band - 1] + rare))
        return nll

    def _inside(self, ids: Tensor, band: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the indices at which ids, of any shape, are words of a band, and these words' indices in the band."""
        start, end = self.edges[band : band + 2]
        where = ((ids >= start) & (ids < end)).nonzero(as_tuple=True)
        return where, ids[where] - start

    def _first(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return log p of the words of band 0, and of the clusters (None without cutoffs)."""
        weight = self.embeddings[0].weight
        if weight.is_meta and not hidden.is_meta:  # F.linear would read uninitialised memory
            raise RuntimeError(
                "the weights of the adaptive vocabulary are offloaded: its softmax reads them, and hooks that load "
                "offloaded weights do not run; keep the module `vocabulary` on a device in accelerate's device_map"
            )
        logits = F.linear(hidden, weight)
        if self.clusters is None:
            return log_softmax(logits), None
        logits = torch.cat([logits, self.clusters(hidden)], dim=-1)
        return log_softmax(logits).split([self.edges[1], len(self.projections) - 1], dim=-1)

    def _rare(self, hidden: Tensor, band: int) -> Tensor:
        """Return log p of a band's words, given that the word is one of the band."""
        narrow = self.dropout(F.linear(hidden, self.projections[band].weight.t()))
        return log_softmax(F.linear(narrow, self.embeddings[band].weight))


def log_softmax(logits: Tensor) -> Tensor:
    """Return log softmax over the last dimension, in float32 or better."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
