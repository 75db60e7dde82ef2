"""Numbers that a run has no room for are told once, before its first step."""

import warnings
from pathlib import Path

import pytest
from support.runs import SMALL, config, new_run

import lathe.verbs.train
from lathe.config.schema import CONTRADICTIONS, together

WORDS = (*SMALL, "trainer.limit_train_batches=4", "trainer.limit_val_batches=1", "test=false")


def said(folder: Path, *words: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lathe.verbs.train.train(new_run(folder, *WORDS, *words))
    return [text for text in map(str, (one.message for one in caught)) if text.startswith("trainer.")]


@pytest.mark.parametrize("calls", ["auto", "1"])
def test_more_batches_to_a_step_than_there_are(calls: str, tmp_path: Path) -> None:
    many = (f"trainer.steps_per_call={calls}", "trainer.accumulate_grad_batches=8")
    (sentence,) = said(tmp_path, *many)
    assert sentence == (
        "trainer.accumulate_grad_batches=8: an epoch has 4 batches and its end makes a step, so no step is of more "
        "than these."
    )


def test_more_steps_at_least_than_the_end_has(tmp_path: Path) -> None:
    (sentence,) = said(tmp_path, "trainer.min_steps=9")
    assert sentence == ("trainer.min_steps=9 is out of reach: trainer.max_epochs=2 ends the run after 8 steps.")


@pytest.mark.parametrize("words", ["trainer.min_steps=8", "trainer.accumulate_grad_batches=4", "trainer.min_epochs=2"])
def test_what_fits_is_not_told(words: str, tmp_path: Path) -> None:
    assert said(tmp_path, words) == []


@pytest.mark.parametrize("split", ["val", "test"])
def test_samples_of_no_batches(split: str) -> None:
    words = ("callbacks=[default,samples]", f"callbacks.samples.split={split}")
    assert not list(together(CONTRADICTIONS, config(*SMALL, *words)))
    (sentence,) = together(CONTRADICTIONS, config(*SMALL, *words, f"trainer.limit_{split}_batches=0"))
    assert sentence.startswith(f"callbacks.samples.split={split} shows samples of batches that trainer.limit_{split}")
