"""Sparsity follows its schedule exactly, by every criterion, over interruptions and on every number of processes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from ranks import on_ranks
from torch import Tensor, nn

from lathe.callbacks.ema import EMA
from lathe.callbacks.pruning import Prune, PruneNM, PruneStructured
from lathe.compression.masks import make_masks
from lathe.compression.sparsity_schedules import SparsitySchedule
from lathe.errors import UserError
from lathe.nets import ViT


class Loader:
    """Six batches `(x [8, 4], y [8])` of this process's half of each, that remember how far they got."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(6, 8, 4, generator=generator), torch.randint(0, 3, (6, 8), generator=generator)
        self.batches = [(a[rank::world], b[rank::world]) for a, b in zip(x, y, strict=True)]
        self.done = self.begin = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        begin, self.begin = self.begin, 0
        for i in range(begin, 6):
            self.done = i + 1
            yield self.batches[i]

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done % 6}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["done"]


class Task(LightningModule):
    """The net's own names in checkpoints, as lathe's tasks do it; the loss is the mean over the whole batch."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = net or nn.Sequential(
            nn.Linear(4, 10), nn.ReLU(), nn.Dropout(0.1), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3)
        )

    def configure_model(self) -> None:
        shard = getattr(self.trainer.strategy, "shard", None)
        if shard is not None:
            shard(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=0.02, weight_decay=0.1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {k.removeprefix("net."): v for k, v in checkpoint["state_dict"].items()}
        checkpoint["random"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"net.{k}": v for k, v in checkpoint["state_dict"].items()}
        self.random = checkpoint["random"]

    def on_train_start(self) -> None:
        if hasattr(self, "random"):
            torch.set_rng_state(self.random)


class Watch(Callback):
    """Zeros among the weights and whether the method says that it is ready, after each step; checkpoints after some."""

    def __init__(self, prune: Prune, folder: Path | None = None, *steps: int) -> None:
        self.prune, self.folder, self.steps = prune, folder, steps
        self.zeros: dict[int, int] = {}
        self.ready: list[int] = []
        self.seen: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        step = trainer.global_step
        weights = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in pl_module.net.named_parameters()}
        self.seen[step] = {name: weight.detach().clone() for name, weight in weights.items()}
        self.zeros[step] = sum(int((weights[name] == 0).sum()) for name in ("0.weight", "3.weight") if name in weights)
        if self.prune.ready(trainer):
            self.ready.append(step)
        if step in self.steps:
            trainer.save_checkpoint(f"{self.folder}/step={step}.ckpt")


def fit(prune: Prune, *callbacks: Callback, task: Task | None = None, resume: str | None = None, steps: int = 24,
        rank: int = 0, strategy: Any = "auto", **options: Any) -> Task:  # fmt: skip
    task, world = task or Task(), 1 if strategy == "auto" else 2
    trainer = Trainer(accelerator="cpu", devices=world, strategy=strategy, logger=False, max_epochs=4, max_steps=steps,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1,
                      use_distributed_sampler=False, callbacks=[prune, *callbacks], **options)  # fmt: skip
    trainer.fit(task, Loader(rank, world), Loader(), ckpt_path=resume, weights_only=True)
    return task


WEIGHTS = 4 * 10 + 10 * 8


@pytest.mark.parametrize("kind", ["cubic", "linear", "exponential", "stepped", "one_shot"])
def test_zeros_follow_the_schedule(kind: Any) -> None:
    prune = Prune(0.7, schedule=kind, start=0.25, end=0.75, every_n_steps=3, initial_sparsity=0.1)
    watch = Watch(prune)
    fit(prune, watch)
    schedule = SparsitySchedule(0.7, kind, 0.1, start=6, end=18, every=3)
    expected, now = {}, 0
    for step in range(1, 25):
        now = round(schedule.at(step) * WEIGHTS) if schedule.due(step) else now
        expected[step] = now
    assert watch.zeros == expected
    assert watch.zeros[24] == round(0.7 * WEIGHTS)
    assert watch.ready == list(range(schedule.last, 25))
    assert prune.report()["prune/sparsity"] == pytest.approx(0.7)


def test_a_stage_of_the_run_is_the_window() -> None:
    prune = Prune(0.5, start=0.0, end=0.5, schedule="linear")
    prune.window = (0.5, 1.0)
    watch = Watch(prune)
    fit(prune, watch)
    assert prune.schedule is not None
    assert (prune.schedule.start, prune.schedule.end) == (12, 18)
    assert [watch.zeros[step] for step in (12, 13, 18, 24)] == [0, 10, 60, 60]


def test_magnitude_takes_the_smallest_of_the_net() -> None:
    prune = Prune(0.5, schedule="one_shot", start=0.5)
    watch = Watch(prune)
    fit(prune, watch)

    class Plain(Prune):
        def on_step(self, *args: Any) -> None: ...

    plain = Plain(0.5)
    dense = Watch(plain)
    fit(plain, dense)
    scores = {name: dense.seen[12][name].abs() for name in ("0.weight", "3.weight")}
    masks = make_masks(scores, 0.5)
    assert all(torch.equal(masks[name], prune.masks[name]) for name in masks)
    assert all(torch.equal(dense.seen[12][name] * masks[name], watch.seen[12][name]) for name in masks)


@pytest.mark.parametrize("criterion", ["magnitude", "random", "taylor", "movement", "wanda"])
@pytest.mark.parametrize("stop", [3, 11, 20])
def test_resume_is_bit_for_bit(tmp_path: Path, criterion: str, stop: int) -> None:
    def run(resume: str | None, steps: int) -> tuple[dict[str, Tensor], Prune]:
        prune = Prune(0.6, criterion=criterion, start=0.1, end=0.75, every_n_steps=4, batches=3)
        (tmp_path / str(steps)).mkdir(exist_ok=True)

        # The run is as long as it was meant to be: the schedule's steps are shares of it.
        class Dies(Callback):
            def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
                trainer.should_stop = trainer.global_step >= steps

        task = fit(prune, EMA(decay=0.5), Watch(prune, tmp_path / str(steps), steps), Dies(), resume=resume)
        return {name: tensor.clone() for name, tensor in task.net.state_dict().items()}, prune

    expected, whole = run(None, 24)
    run(None, stop)
    found, again = run(f"{tmp_path}/{stop}/step={stop}.ckpt", 24)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(torch.equal(again.masks[name], whole.masks[name]) for name in whole.masks)
    assert sum(int((found[name] == 0).sum()) for name in whole.masks) == round(0.6 * WEIGHTS)
    assert again.updates == whole.updates > 3


def test_criteria_choose_differently() -> None:
    chosen = {}
    for criterion in ("magnitude", "random", "taylor", "movement", "wanda"):
        prune = Prune(0.6, criterion=criterion, start=0.1, end=0.5, schedule="linear", every_n_steps=4)
        fit(prune)
        chosen[criterion] = torch.cat([mask.flatten() for mask in prune.masks.values()])
        assert int((~chosen[criterion]).sum()) == round(0.6 * WEIGHTS)
    words = list(chosen)
    assert not any(torch.equal(chosen[a], chosen[b]) for i, a in enumerate(words) for b in words[:i])


def test_taylor_counts_each_step_since_the_last_update(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    class Sees(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
            weight = pl_module.net[0].weight
            seen.append((weight * weight.grad).abs().detach().clone())

    prune = Prune(0.5, criterion="taylor", start=0.25, end=0.75, every_n_steps=6, schedule="linear")
    scores: dict[int, dict[str, Tensor]] = {}
    made = Prune.scores

    def kept(self: Prune, net: nn.Module, step: int) -> dict[str, Tensor]:
        scores[step] = {name: score.clone() for name, score in made(self, net, step).items()}
        return scores[step]

    monkeypatch.setattr(Prune, "scores", kept)
    fit(prune, Sees(), accumulate_grad_batches=1)
    torch.testing.assert_close(scores[12]["0.weight"], torch.stack(seen[6:12]).sum(0))
    torch.testing.assert_close(scores[18]["0.weight"], torch.stack(seen[12:18]).sum(0))


def test_wanda_leaves_the_net_and_the_random_numbers_as_they_were() -> None:
    def run(criterion: str) -> Watch:
        prune = Prune(0.5, criterion=criterion, schedule="one_shot", start=0.5)
        watch = Watch(prune)
        torch.manual_seed(3)
        norm = nn.Sequential(nn.Linear(4, 10), nn.BatchNorm1d(10), nn.Dropout(0.5), nn.Linear(10, 8), nn.Linear(8, 3))
        fit(prune, watch, task=Task(norm))
        return watch

    one, other = run("wanda"), run("magnitude")
    assert all(torch.equal(one.seen[11][name], other.seen[11][name]) for name in one.seen[11])
    assert not torch.equal(one.seen[12]["3.weight"] == 0, other.seen[12]["3.weight"] == 0)


def test_rows_and_groups(tmp_path: Path) -> None:
    rows = PruneStructured(0.5, start=0.0, end=0.5)
    task = fit(rows)
    assert [int((task.net[i].weight == 0).all(1).sum()) for i in (0, 3)] == [5, 4]
    groups = PruneNM(start=0.0, end=0.5, layers=["0"])
    task = fit(groups)
    assert ((task.net[0].weight.reshape(10, 1, 4) != 0).sum(2) == 2).all()
    assert groups.report()["prune_nm/sparsity"] == 0.5


def test_channels_by_the_scale_of_their_batchnorm() -> None:
    net = nn.Sequential(nn.Linear(4, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 3))
    with torch.no_grad():
        net[1].weight.copy_(torch.arange(1.0, 11.0))
    prune = PruneStructured(0.3, criterion="batchnorm", schedule="one_shot", start=0.0)
    fit(prune, task=Task(net))
    assert prune.masks["0.weight"].any(1).tolist() == [False] * 3 + [True] * 7
    with pytest.raises(UserError, match=r"no BatchNorm of 8 channels follows 3\.weight"):
        fit(PruneStructured(0.3, criterion="batchnorm", exclude=["0"]))


def test_layers_that_do_not_divide() -> None:
    # Layers are 4 -> 10 -> 8: the second has 10 inputs and most of the weights.
    with pytest.warns(
        UserWarning, match=r"compression\.prune_nm leaves 3\.weight dense, which do not divide into groups of 4 inputs"
    ):
        fit(PruneNM(), steps=1)
    with pytest.raises(UserError, match=r"compression\.prune_nm\.layers: 3\.weight does not divide into groups of 4"):
        fit(PruneNM(layers=["3"]))
    fit(PruneNM(exclude=["3"]), steps=1)
    with pytest.raises(UserError, match=r"compression\.prune_nm finds nothing to mask"):
        fit(PruneNM(m=5, n=1, exclude=["3"]))


def test_a_run_that_goes_on_from_a_dense_checkpoint_is_pruned_at_once(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 18:
                trainer.save_checkpoint(tmp_path / "dense.ckpt")

    class Plain(Callback): ...

    fit(Plain(), Saves())  # type: ignore[arg-type]
    prune = Prune(0.5, start=0.1, end=0.6)
    watch = Watch(prune)
    fit(prune, watch, resume=str(tmp_path / "dense.ckpt"))
    assert watch.zeros == dict.fromkeys(range(19, 25), 60)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sparsity": 1.5}, r"compression\.prune\.sparsity=1\.5 is not in \[0, 1\)"),
        ({"sparsity": 0.0}, r"compression\.prune\.sparsity=0\.0 is not between 0 and 1"),
        ({"criterion": "hessian"}, r"compression\.prune\.criterion=hessian is unknown: choose magnitude"),
        ({"criterion": "batchnorm"}, r"compression\.prune\.criterion=batchnorm scores whole channels"),
        ({"granularity": "n_m", "sparsity": 0.8}, r"compression\.prune\.sparsity=0\.8 is more than 2 of 4 leaves: at most 0\.5"),
        ({"schedule": "square"}, r"compression\.prune\.schedule=square is unknown"),
        ({"start": 0.7, "end": 0.6}, r"compression\.prune\.start=0\.7 and end=0\.6 are no shares"),
        ({"every_n_steps": 0}, r"compression\.prune\.every_n_steps=0 is below 1"),
        ({"norm": 0.0}, r"compression\.prune\.norm=0\.0 is no norm"),
        ({"batches": 0}, r"compression\.prune\.batches=0 is below 1"),
        ({"scope": "all"}, r"compression\.prune\.scope=all is unknown"),
    ],
)
def test_values_out_of_range_are_named(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Prune(**options)


def test_a_run_without_end_has_no_shares(tiny: SimpleNamespace) -> None:
    with pytest.raises(UserError, match=r"trainer\.max_epochs=-1"):
        tiny.trainer(Prune(), max_epochs=-1, limit_train_batches=2).fit(tiny.Task(), tiny.Loader())


# -- processes


def on_a_rank(rank: int, folder: str, criterion: str, strategy: str, resume: str | None) -> Any:
    from lathe.strategies import DDP
    from lathe.strategies.fsdp import FSDP

    prune = Prune(0.6, criterion=criterion, start=0.1, end=0.75, every_n_steps=4, batches=2)
    watch = Watch(prune, Path(folder), 11)
    net = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Identity(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))
    torch.manual_seed(0)
    for layer in net:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    made: Any = {"ddp": DDP, "fsdp": lambda: FSDP(min_params=10), "auto": lambda: "auto"}[strategy]()
    fit(prune, EMA(decay=0.5), watch, task=Task(net), rank=rank, strategy=made, resume=resume)
    return watch.seen[24], prune.masks, watch.zeros


@pytest.mark.parametrize(
    ("strategy", "criterion"),
    [
        ("ddp", "magnitude"),
        ("fsdp", "taylor"),
        pytest.param("ddp", "taylor", marks=pytest.mark.slow),
        pytest.param("ddp", "wanda", marks=pytest.mark.slow),
        pytest.param("fsdp", "magnitude", marks=pytest.mark.slow),
        pytest.param("fsdp", "wanda", marks=pytest.mark.slow),
    ],
)
def test_two_processes_hold_the_masks_of_one_and_resume(tmp_path: Path, strategy: str, criterion: str) -> None:
    alone, masks, zeros = on_a_rank(0, str(tmp_path), criterion, "auto", None)
    (tmp_path / "two").mkdir()
    first = on_ranks(on_a_rank, str(tmp_path / "two"), criterion, strategy, None)
    (tmp_path / "again").mkdir()
    again = on_ranks(on_a_rank, str(tmp_path / "again"), criterion, strategy, str(tmp_path / "two" / "step=11.ckpt"))
    for weights, own, counts in first:
        assert counts == zeros
        assert all(torch.equal(own[name], masks[name]) for name in masks)
        for name in alone:
            torch.testing.assert_close(weights[name], alone[name], rtol=1e-4, atol=1e-5)
    for (one, own, counts), (other, own_too, rest) in zip(first, again, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert all(torch.equal(own[name], own_too[name]) for name in own)
        assert rest == {step: zero for step, zero in counts.items() if step > 11}
    saved = torch.load(tmp_path / "two" / "step=11.ckpt", weights_only=True)
    (state,) = [value for key, value in saved["callbacks"].items() if "Prune" in key]
    for name, mask in state["masks"].items():
        assert mask.shape == masks[name].shape
        assert (saved["state_dict"][name][~mask] == 0).all()


class Images(Loader):
    """The same batches as squares of 4x4 pixels, whole on every process."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.batches = [(torch.randn(8, 1, 4, 4, generator=generator), y) for _, y in self.batches]


def cut_layers(rank: int, criterion: str, devices: int) -> Any:
    from lathe.strategies.tensor import Tensor as TensorParallel

    torch.manual_seed(0)
    task = Task(ViT(width=16, depth=2, heads=2, patch_size=2, channels=1, image_size=4, num_classes=3))
    prune = Prune(0.6, criterion=criterion, start=0.1, end=0.75, every_n_steps=4, batches=2)
    made: Any = TensorParallel(tensor=2) if devices == 2 else "auto"
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=made, logger=False, max_epochs=4, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False, callbacks=[prune, EMA(decay=0.5)])  # fmt: skip
    trainer.fit(task, Images(), Images())
    weights = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in task.net.named_parameters()}
    return {name: weight.detach() for name, weight in weights.items()}, prune.masks


@pytest.mark.slow
@pytest.mark.parametrize("criterion", ["magnitude", "taylor", "wanda"])
def test_layers_that_processes_share_have_the_masks_of_one(criterion: str) -> None:
    alone, masks = cut_layers(0, criterion, 1)
    for weights, own in on_ranks(cut_layers, criterion, 2, timeout=120):
        assert sum(int((~mask).sum()) for mask in own.values()) == round(0.6 * sum(mask.numel() for mask in masks.values()))
        assert all(torch.equal(own[name], masks[name]) for name in masks)
        # The gradient of keys' biases is zero but for rounding, which AdamW blows up.
        for name in [name for name in alone if not name.endswith("k.bias")]:
            torch.testing.assert_close(weights[name], alone[name], rtol=1e-3, atol=1e-4)
        assert all((weights[name][~own[name]] == 0).all() for name in own)


def differing(rank: int) -> str:
    prune = Prune(0.5)
    prune.masks = {"a": torch.tensor([True, bool(rank)])}
    with pytest.raises(UserError) as caught:
        prune.state_dict()
    return str(caught.value)


def test_processes_with_different_masks_are_told() -> None:
    one, other = on_ranks(differing)
    assert one == other
    assert one.startswith("compression.prune: the processes hold different masks (")


def sends(rank: int) -> dict[str, Tensor]:
    prune = Prune(0.5)
    prune.parameters = {"a": nn.Parameter(torch.ones(2, 2))}
    prune.set_masks({"a": torch.tensor([[True, False], [True, bool(rank)]])})
    return {**prune.masks, "weight": prune.parameters["a"].detach()}


def test_the_masks_are_those_of_process_0() -> None:
    for held in on_ranks(sends):
        assert held["a"].tolist() == [[True, False], [True, False]]
        assert held["weight"].tolist() == [[1, 0], [1, 0]]
