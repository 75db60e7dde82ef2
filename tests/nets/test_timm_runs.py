"""Nets of timm in runs: fine-tuned from a file, evaluated, exported, sharded by fsdp, compressed."""

import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from support import pipeline_fit, timm_here
from support.exports import request
from support.pipeline_fit import adam
from support.ranks import on_ranks
from support.runs import column, config, new_run, weights
from support.strategy_fit import TIMM, fit, mean_losses, relative

from lathe.errors import UserError
from lathe.nets import blocks_of, timm_net
from lathe.nets.blocks import run
from lathe.optim.build import layer_numbers
from lathe.runs.build import make_task
from lathe.runs.rundir import RunDir
from lathe.strategies import Pipeline
from lathe.strategies.fsdp import FSDP, units
from lathe.strategies.partition import chain_of
from lathe.training.train import train
from lathe.verbs.evaluate import evaluate
from lathe.verbs.export import ship

pytestmark = pytest.mark.usefixtures("timm")
SHORT = (
    "model=timm",
    "data.batch_size=64",
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "trainer.max_epochs=1",
    "trainer.log_every_n_steps=1",
)


@pytest.mark.slow
@pytest.mark.law6
def test_a_net_is_fine_tuned_from_a_file_evaluated_and_exported(tmp_path: Path) -> None:
    file = tmp_path / "resnet10t.pth"
    torch.manual_seed(3)
    torch.save(import_module("timm").create_model("resnet10t", num_classes=7).state_dict(), file)
    cfg = new_run(
        tmp_path / "logs",
        *SHORT,
        "model.name=resnet10t",
        f"model.pretrained={file}",
        "optimizer.layer_decay=0.7",
        "optimizer.lr=0.02",
        "scheduler=constant",
        "scheduler.warmup=0",
        "freeze=[conv1.*,bn1.*]",
        "trainer.max_epochs=2",
    )
    train(cfg)
    file.unlink()
    made = RunDir(cfg["paths"]["run_dir"])
    assert column(made.path, "train/loss_epoch")[-1] < 0.6 * column(made.path, "train/loss_epoch")[0]
    found = evaluate(request(made) | {"request": config(f"run={made.path}", name="evaluate")})
    assert found["test/accuracy"] == pytest.approx(made.result["test/accuracy"], abs=1e-7)
    report = ship(request(made, "target=onnx"))["onnx"]
    assert report["held_out"]["relative"] < 1e-5
    assert (report["held_out"]["agreement"], report["drop"]) == (1.0, 0.0)
    # timm itself can load the file
    own = import_module("timm").create_model("resnet10t", in_chans=1, num_classes=10)
    own.load_state_dict(weights(made.path, "best"))


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("convnext_atto", ["stem.0.weight"], ["head.norm.weight", "head.fc.weight"]),
        ("vit_tiny_patch16_224", ["cls_token", "pos_embed", "patch_embed.proj.weight"], ["norm.weight", "head.weight"]),
    ],
)
def test_layer_decay_follows_the_depth(name: str, first: list[str], last: list[str]) -> None:
    options = ["optimizer.layer_decay=0.5", "optimizer.lr=1.0", "optimizer.scale_lr=none", "data.image_size=32"]
    task = make_task(config("model=timm", f"model.name={name}", *options))
    names = {id(parameter): key for key, parameter in task.net.named_parameters()}
    groups = task._make_optimizer(task.net).param_groups
    rates = {names[id(p)]: group["lr"] for group in groups for p in group["params"]}
    numbers = layer_numbers(task.net)
    top = max(numbers.values())
    assert top == len(task.net.blocks) + 1
    assert rates == {key: pytest.approx(0.5 ** (top - number)) for key, number in numbers.items()}
    assert {numbers[key] for key in first} == {0}
    assert {numbers[key] for key in last} == {top}
    if name == "convnext_atto":  # downsampling is between the stages' blocks
        chain = ["stages.0.blocks.1.conv_dw.weight", "stages.1.downsample.1.weight", "stages.1.blocks.0.conv_dw.weight"]
        assert [numbers[key] for key in chain] == [2, 3, 4]


SHARDED, CUT = "vit_tiny_patch16_224", "convnext_atto"


def shared_out(rank: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        timm_here.use(patch)
        return fit(SHARDED, FSDP(), world=2, part=(rank, 2), steps=3)


@pytest.mark.slow
@pytest.mark.law2
def test_fsdp_on_two_ranks_has_the_losses_of_one_process() -> None:
    ranks, alone = on_ranks(shared_out, timeout=200), fit(SHARDED, steps=3)
    assert relative(mean_losses(ranks), alone["losses"]) < 1e-4
    assert ranks[0]["held"] < 0.6 * alone["held"]
    for name in TIMM:
        net = timm_net(name, in_channels=1, num_classes=3, image_size=32)
        whole = sum(p.numel() for p in net.parameters())
        assert sum(p.numel() for unit in units(net, 0) for p in unit.parameters()) > 0.9 * whole, name


def cut(rank: int, folder: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        timm_here.use(patch)
        return pipeline_fit.plain(pipeline_fit.fit(CUT, Pipeline(), folder=Path(folder), optimizer=adam))


@pytest.mark.slow
@pytest.mark.law2
def test_a_pipeline_of_two_stages_has_the_losses_of_one_process(tmp_path: Path) -> None:
    ranks = on_ranks(cut, str(tmp_path / "two"), timeout=250)
    alone = pipeline_fit.fit(CUT, folder=tmp_path / "one", optimizer=adam)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-3)
        assert rank["validated"] == pytest.approx(alone["validated"], rel=1e-3)
    files = [torch.load(tmp_path / where / "last.ckpt", weights_only=True) for where in ("one", "two")]
    assert [*files[0]["state_dict"]] == [*files[1]["state_dict"]]


CHAINED = ("mobilenetv3_small_050", "efficientnet_b0", "regnetx_002")


@pytest.mark.parametrize("name", [*TIMM, *(pytest.param(name, marks=pytest.mark.slow) for name in CHAINED)])
def test_a_net_is_its_parts(name: str) -> None:
    net = timm_net(name, in_channels=1, num_classes=3, image_size=32)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    other = copy.deepcopy(net)
    assert len(chain_of(other, "pipeline")) > 3
    x = torch.randn(2, 1, 32, 32)
    with torch.no_grad():
        assert torch.equal(other.eval()(x), other.leave(run(blocks_of(other), other.enter(x))))
        for parameter in net.parameters():
            parameter.zero_()  # a copy's parameters are separate
        assert torch.equal(other(x), other.leave(run(blocks_of(other), other.enter(x))))
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())


def test_a_net_that_is_more_than_its_parts_is_not_cut() -> None:
    net = timm_net("xcit_nano_12_p16_224", in_channels=1, num_classes=3, image_size=32)
    with pytest.raises(UserError, match="use strategy=ddp or fsdp"):
        chain_of(net, "pipeline")
