"""Random numbers depend only on (seed, purpose, epoch, sample)."""

import torch

from lathe.data.random import hashed_seed, sample_betas, sample_seeds, sample_uniforms, to_integers


def test_integers_are_uniform_and_never_reach_the_count() -> None:
    largest = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))
    assert to_integers(largest[None], 9).tolist() == [8]
    counts = torch.bincount(to_integers(sample_uniforms(0, 0, 90_000, 1)[:, 0], 9), minlength=9)
    # nine bins of 10,000 with a standard deviation of 94: five of them on either side
    assert (counts - 10_000).abs().max() < 470


def test_betas_have_the_mean_and_variance_of_their_distribution() -> None:
    draws = sample_betas(0, 0, 100_000, 0.5, "mixup")
    assert abs(draws.mean() - 0.5) < 0.006
    assert abs(draws.var() - 1 / (4 * (2 * 0.5 + 1))) < 0.002


def test_the_seeds_of_a_batch_are_those_of_its_samples() -> None:
    rows = [0, 5, 10**9]
    assert sample_seeds(-3, rows, 7) == [hashed_seed(-3, f"sample {row}", 7) for row in rows]
    assert sample_seeds(0, [1, 2], 0) == [7198330153459917495, 65179983866782543]  # pinned by earlier runs
