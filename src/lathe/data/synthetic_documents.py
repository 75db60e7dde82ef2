"""Documents of random lengths from a source of known entropy."""

import math
from typing import Annotated

import numpy as np
from pydantic import Field

from lathe.config.types import Count, Seed, Share
from lathe.config.validation import validated
from lathe.data import random
from lathe.data.checks import check_number
from lathe.data.synthetic_tokens import SyntheticTokens
from lathe.data.tokens import Tokens


class SyntheticDocuments:
    """Random-length prefixes of the sequences of `SyntheticTokens`, each ended by `vocab_size - 1`.

    A document has L tokens before its end, P(L = n) = ln((n + 1) / n) / ln((longest + 1) / shortest) for shortest <= n
    <= longest: many short ones, few long ones, as in text. With U = vocab_size - 1 tokens other than the end, and h the
    entropy of a step of the chain, a document carries H(L) + E[min(L, lag)] ln U + E[max(L - lag, 0)] h nats in E[L] +
    1 targets.

    Args:
        vocab_size: tokens, the end included.
        shortest: tokens of the shortest documents, without the end; at least 1.
        longest: tokens of the longest ones.
        train_size: training documents.
        val_size: validation documents.
        test_size: test documents.
        noise: probability, from 0 to 1, that a token is redrawn.
        lag: distance to the token that determines the next.
        seed: of the chain and the documents; independent of the run's seed.
    """

    @validated
    def __init__(
        self,
        vocab_size: Annotated[int, Field(ge=3)] = 64,
        shortest: Count = 4,
        longest: Annotated[int, Field(ge=2)] = 127,
        train_size: Count = 4096,
        val_size: Count = 256,
        test_size: Count = 256,
        noise: Share = 0.2,
        lag: Count = 1,
        seed: Seed = 0,
    ) -> None:
        check_number("shortest", shortest, 1, longest)
        self.chain = SyntheticTokens(vocab_size - 1, longest - 1, train_size, val_size, test_size, noise, lag, seed)
        self.vocab_size, self.end = vocab_size, vocab_size - 1
        self.shortest, self.longest, self.seed = shortest, longest, seed

    @property
    def entropy(self) -> float:
        """Return the lowest expected loss, in nats per target, the ends included."""
        n = np.arange(self.shortest, self.longest + 1)
        odds = np.log((n + 1) / n) / math.log((self.longest + 1) / self.shortest)
        uniform, lag = math.log(self.vocab_size - 1), self.chain.lag
        step = (self.chain.entropy * self.chain.length - (lag - 1) * uniform) / (self.chain.length - lag + 1)
        nats = -odds * np.log(odds) + odds * (np.minimum(n, lag) * uniform + np.maximum(n - lag, 0) * step)
        return float(nats.sum() / (odds * (n + 1)).sum())

    def prepare(self) -> None:
        """Do nothing: documents are drawn by `load`."""

    def load(self) -> dict[str, Tokens]:
        """Return one stream for each split, each document ended by `end`."""
        return {
            name: Tokens(self._shorten(tokens, stream))
            for stream, (name, tokens) in enumerate(self.chain.load().items(), 1)
        }

    def _shorten(self, tokens: Tokens, stream: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
        sequences = tokens.ids.reshape(-1, self.longest)
        uniforms = random.stream(self.seed, 2**32 + stream).random(len(sequences))
        spread = math.log((self.longest + 1) / self.shortest)
        lengths = np.minimum((self.shortest * np.exp(uniforms * spread)).astype(np.int64), self.longest)
        ended = np.concatenate([sequences, np.zeros_like(sequences[:, :1])], axis=1)
        np.put_along_axis(ended, lengths[:, None], self.end, axis=1)
        return ended[np.arange(self.longest + 1) <= lengths[:, None]]
