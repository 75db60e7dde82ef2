"""Synthetic documents have the stated lengths and entropy."""

import numpy as np
import pytest

from lathe.data.documents import find_documents
from lathe.data.synthetic_documents import SyntheticDocuments


def test_the_synthetic_source_has_the_entropy_it_names() -> None:
    """A long sample's empirical code length under the true source is the entropy to within its spread."""
    source = SyntheticDocuments(vocab_size=17, shortest=3, longest=40, train_size=20000, noise=0.3, lag=2)
    documents = find_documents(source.load()["train"].ids, source.end)
    inner = documents.lengths - 1
    assert (inner.min(), inner.max()) == (3, 40)
    n = np.arange(3, 41)
    odds = np.log((n + 1) / n) / np.log(41 / 3)
    assert np.abs(np.bincount(inner, minlength=41)[3:] / 20000 - odds).max() < 0.01
    p, q = 1 - 0.3 + 0.3 / 16, 0.3 / 16
    nats, ids = -np.log(odds)[inner - 3].sum(), documents.ids.astype(int)
    for start, size in zip(documents.starts[:4000], inner[:4000], strict=True):
        text = ids[start : start + size]
        follows = text[2:] == source.chain.successor[text[:-2]]
        nats += np.where(follows, -np.log(p), -np.log(q)).sum() * 5 + min(size, 2) * np.log(16) * 5
    assert nats / documents.lengths.sum() == pytest.approx(source.entropy, rel=0.01)
