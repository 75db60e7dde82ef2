"""Limits that a run can't reach are reported once, before its first step."""

import warnings
from pathlib import Path

import pytest
from support.runs import SMALL, config, new_run

import lathe.training.train
from lathe.config.schema import CONTRADICTIONS, together

WORDS = (*SMALL, "trainer.limit_train_batches=4", "trainer.limit_val_batches=1", "test=false")


def said(folder: Path, *words: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lathe.training.train.train(new_run(folder, *WORDS, *words))
    return [text for text in map(str, (one.message for one in caught)) if text.startswith("trainer.")]


@pytest.mark.parametrize("calls", ["auto", "1"])
def test_accumulating_more_batches_than_an_epoch_has(calls: str, tmp_path: Path) -> None:
    many = (f"trainer.steps_per_call={calls}", "trainer.accumulate_grad_batches=8")
    (sentence,) = said(tmp_path, *many)
    assert sentence.startswith("trainer.accumulate_grad_batches=8: an epoch has 4 batches")


def test_min_steps_after_the_end(tmp_path: Path) -> None:
    (sentence,) = said(tmp_path, "trainer.min_steps=9")
    assert sentence.startswith("trainer.min_steps=9 is never reached: trainer.max_epochs=2")


@pytest.mark.parametrize("words", ["trainer.min_steps=8", "trainer.accumulate_grad_batches=4", "trainer.min_epochs=2"])
def test_limits_that_fit_are_not_reported(words: str, tmp_path: Path) -> None:
    assert said(tmp_path, words) == []


@pytest.mark.parametrize("split", ["val", "test"])
def test_samples_of_no_batches(split: str) -> None:
    words = ("callbacks=[default,samples]", f"callbacks.samples.split={split}")
    assert not list(together(CONTRADICTIONS, config(*SMALL, *words)))
    (sentence,) = together(CONTRADICTIONS, config(*SMALL, *words, f"trainer.limit_{split}_batches=0"))
    assert sentence.startswith(f"callbacks.samples.split={split} shows samples of batches that trainer.limit_{split}")
