"""Training stops at the right step and names the first non-finite tensor."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn

from lathe.callbacks.nan_guard import NanGuard
from lathe.errors import UserError


class Poison(nn.Module):
    """Multiplies by nan from the n-th training call, in forward or only in backward."""

    def __init__(self, call: int, backward: bool = False) -> None:
        super().__init__()
        self.call, self.backward, self.calls = call, backward, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if not self.training or self.calls < self.call:
            return x
        return Backward.apply(x) if self.backward else x * torch.nan


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.nan


def net(poison: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), poison, nn.Linear(4, 2))


def finite(module: nn.Module) -> bool:
    return all(bool(t.isfinite().all()) for t in module.state_dict().values())


def test_a_bad_activation_is_named_and_the_weights_are_whole(tiny: SimpleNamespace) -> None:
    task = tiny.Task(net(Poison(4)))
    with pytest.raises(
        UserError, match=r"optimizer step 4 the loss is nan: the first module with nan in its output is 1 \(Poison\)"
    ):
        tiny.trainer(NanGuard()).fit(task, tiny.Loader())
    assert finite(task.net)


def test_weights_that_are_not_finite_are_told_before_the_first_step(tiny: SimpleNamespace) -> None:
    """As from a checkpoint: no step or learning rate is blamed."""
    task = tiny.Task()
    task.net[0].weight.data[0] = torch.nan
    with pytest.raises(UserError, match=r"^Training can't begin: parameter 0\.weight is nan before the first step"):
        tiny.trainer(NanGuard()).fit(task, tiny.Loader())


def test_a_bad_batch_is_named(tiny: SimpleNamespace) -> None:
    loader = tiny.Loader()
    loader.batches[2][0][3, 1] = torch.inf
    with pytest.raises(UserError) as caught:
        tiny.trainer(NanGuard()).fit(tiny.Task(), loader)
    assert str(caught.value) == (
        "Training stopped: in optimizer step 3 the loss is nan: the batch itself holds inf (batch[0], in row 3 of 8); "
        "drop or fill such rows in the data."
    )


def test_a_validation_that_is_not_finite_is_reported_once_with_its_row(tiny: SimpleNamespace) -> None:
    """The run continues."""

    class LogsLoss(tiny.Task):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", self.net(batch[0]).sum())

    held_out, trainer = tiny.Loader(), tiny.trainer(NanGuard(), max_epochs=2)
    held_out.batches[1][0][3, 1] = torch.inf
    with pytest.warns(UserWarning, match="is not finite") as caught:
        trainer.fit(LogsLoss(), tiny.Loader(), held_out)
    messages = [str(warning.message) for warning in caught if "not finite" in str(warning.message)]
    reason = "batch 1 of validation holds inf (batch[0], in row 3 of 8)"
    assert messages == [f"val/loss is not finite after step 6: {reason}."]
    assert trainer.current_epoch == 2


def test_a_bad_gradient_is_named_before_it_is_used(tiny: SimpleNamespace) -> None:
    task = tiny.Task(net(Poison(2, backward=True)))
    with pytest.raises(
        UserError, match=r"optimizer step 2 the gradient of 0\.weight is nan although the loss is finite"
    ):
        tiny.trainer(NanGuard(every_n_steps=1)).fit(task, tiny.Loader())
    assert finite(task.net)


def test_a_bad_buffer_is_named_and_a_mask_of_inf_is_not(tiny: SimpleNamespace) -> None:
    def spoil(trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 9:
            module.net[1].running_var[0] = torch.nan

    task = tiny.Task()
    task.net.register_buffer("mask", torch.tensor([-torch.inf]))
    tiny.trainer(NanGuard(), max_epochs=1).fit(task, tiny.Loader())
    with pytest.raises(UserError, match=r"after optimizer step 12 buffer 1\.running_var is nan"):
        tiny.trainer(NanGuard(), LambdaCallback(on_train_batch_end=spoil)).fit(task, tiny.Loader())


@pytest.mark.parametrize(("every", "call", "read", "accumulate"), [(5, 7, 10, 2), (4, 8, 8, 1)])
def test_losses_put_aside_still_give_the_exact_step(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, every: int, call: int, read: int, accumulate: int
) -> None:
    """As on a GPU, where losses are read in later steps."""
    guard = NanGuard(every_n_steps=every)
    monkeypatch.setattr(
        NanGuard,
        "on_train_batch_start",
        lambda self, t, m, b, i: (setattr(self, "_at_once", False), setattr(self, "_batch", b)),
    )
    task = tiny.Task(net(Poison(call * accumulate)))
    trainer = tiny.trainer(guard, accumulate_grad_batches=accumulate, max_epochs=1)
    expected = f"in optimizer step {call} the loss is nan" + (
        ", read at step" if read > call else ": the first module with nan"
    )
    with pytest.raises(UserError, match=expected):
        trainer.fit(task, tiny.Loader(12 * accumulate))
    assert trainer.global_step == read - 1


def test_a_grad_scaler_may_overflow(tiny: SimpleNamespace) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    precision = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**40))
    tiny.trainer(NanGuard(every_n_steps=1), plugins=precision).fit(task := tiny.Task(), tiny.Loader())
    assert precision.scaler.get_scale() < 2.0**40  # it did overflow
    assert finite(task.net)


def test_gradients_that_no_scale_mends_stop_training(tiny: SimpleNamespace) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    precision = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**-7))
    task = tiny.Task(net(Poison(1, backward=True)))
    with pytest.raises(UserError, match=r"optimizer step 3 the gradient of 0\.weight is nan"):
        tiny.trainer(NanGuard(every_n_steps=1), plugins=precision).fit(task, tiny.Loader())
    assert finite(task.net)


def test_a_finite_run_does_not_change(tiny: SimpleNamespace) -> None:
    plain, guarded = tiny.Task(), tiny.Task()
    tiny.trainer().fit(plain, tiny.Loader())
    tiny.trainer(NanGuard(every_n_steps=1)).fit(guarded, tiny.Loader())
    for a, b in zip(plain.net.state_dict().values(), guarded.net.state_dict().values(), strict=True):
        assert torch.equal(a, b)
