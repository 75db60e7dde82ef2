"""The net is compiled in place and put into channels_last: same names, same results."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from support.commands import check, run
from support.ranks import on_ranks
from support.runs import QUIET, column, new_run, weights
from torch import nn

import lathe.training.train
from lathe.callbacks import Graphs
from lathe.errors import ArgumentError
from lathe.nets import MLP, CifarResNet
from lathe.strategies import channels_last, compile_net


@pytest.fixture
def net() -> MLP:
    torch.manual_seed(0)
    return MLP(width=8, depth=3, dropout=0.0, channels=1, image_size=4, num_classes=3)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Record the modules passed to torch.compile, in order, without compiling."""
    asked: list[tuple[nn.Module, dict[str, Any]]] = []

    def note(call: Any, **options: Any) -> Any:
        asked.append((call.__self__, options))
        return call

    monkeypatch.setattr(torch, "compile", note)
    return asked


# torch's compiler imports deprecated parts of torch
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_result_and_names_are_those_of_the_eager_net(net: MLP, backend: Any) -> None:
    x = torch.randn(5, 1, 4, 4)
    names, expected = list(net.state_dict()), net(x)
    expected.sum().backward()
    gradients = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_net(net, "cpu", backend=backend)
    y = net(x)
    y.sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6)
    assert list(net.state_dict()) == names
    assert isinstance(net, MLP)


@pytest.mark.parametrize(("width", "is_safe"), [(4, False), (16, True)])
def test_narrow_strided_1x1_convolutions_keep_their_layout_on_a_cpu(
    compiled: list[tuple[nn.Module, dict[str, Any]]], width: int, is_safe: bool
) -> None:
    """oneDNN's gradient of these in channels_last format writes out of bounds: compiled training died of it."""
    net = CifarResNet(depth=8, width=width, in_channels=1, num_classes=10)
    compile_net(net, "cpu", mode="max-autotune")
    compile_net(net, "cpu", options={"max_autotune": True})
    compile_net(net, "cuda")
    layouts = [options.get("options", {}).get("layout_optimization", True) for _, options in compiled]
    assert layouts == [is_safe, is_safe, True]
    assert compiled[0][1].get("options", {"max_autotune": True})["max_autotune"]


def test_regional_compiles_each_block_and_nothing_else(
    net: MLP, compiled: list[tuple[nn.Module, dict[str, Any]]]
) -> None:
    compile_net(net, "cpu", regional=True)
    assert [id(module) for module, _ in compiled] == [id(block) for block in net.blocks]
    assert len(compiled) == 2
    assert all(
        options == {"mode": "default", "dynamic": None, "fullgraph": False, "backend": "inductor"}
        for _, options in compiled
    )


@pytest.mark.parametrize(
    ("depth", "alone"),
    [(20, False), (38, True)],  # 9 blocks and 18, of five kinds: three widths, and the first of two stages
)
def test_many_blocks_of_few_kinds_are_compiled_one_by_one(
    depth: int, alone: bool, compiled: list[tuple[nn.Module, dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    net = CifarResNet(depth=depth, width=4)
    with caplog.at_level(logging.INFO, "lathe.strategies.compilation"):
        compile_net(net, "cpu")
    assert [id(module) for module, _ in compiled] == [id(part) for part in (net.blocks if alone else [net])]
    assert caplog.messages == alone * ["compile.regional=auto: 18 blocks of 5 kinds, each compiled by itself"]


@pytest.mark.slow
def test_one_process_and_ddp_keep_their_graphs(tmp_path: Path) -> None:
    """Captured and differentiated without kernels, which break no graph. fully_shard keeps its hooks out of graphs, as
    the table says.
    """
    words = ("part=plain", "compiles=[default]", "precisions=[32-true]", "inductor=[]", "models=[resnet,gpt]")
    found = check(run(*words, "strategies=[ddp]", "output=null", script="scripts/support.py", cwd=tmp_path))
    told = " ".join(found.stdout.split())
    assert "4 compiled cells; places where a graph was given up: none;" in told
    assert "after the first optimizer step: none; cells without any graph: none." in told


def test_graphs_after_the_first_step_are_counted() -> None:
    """Also in the first accumulated batch of the second step."""
    torch.compiler.reset()
    graphs: Any = Graphs()
    net = torch.compile(nn.Linear(3, 2), backend="eager", dynamic=False)
    for sizes, made, anew in (((4, 4, 5, 6), 3, 2), ((7, 7, 7, 7), 1, 0), ((4, 5, 7, 7), 0, 0)):
        graphs.on_train_start(None, None)
        for batch, size in enumerate(sizes, 1):
            net(torch.zeros(size, 3))
            graphs.on_train_batch_end(SimpleNamespace(global_step=batch // 2), None, None, None, 0)
        assert (Graphs.made, Graphs.anew) == (made, anew)
    torch.compiler.reset()


# channels_last

RUN = (
    *("model=resnet20", "model.net.depth=8", "model.net.width=16", "data.batch_size=16", *QUIET),
    *("trainer.limit_train_batches=2", "trainer.limit_val_batches=1", "trainer.max_epochs=2"),
    *("trainer.log_every_n_steps=1", "precision=64-true", "test=false"),
)


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return CifarResNet(depth=8, in_channels=3, num_classes=10)


@pytest.mark.parametrize("wanted", [True, "auto"])
def test_convolutions_run_in_that_order(wanted: Any) -> None:
    plain, laid = resnet().eval(), resnet().eval()
    channels_last(laid, SingleDeviceStrategy(), wanted)
    orders = []
    for module in laid.modules():
        if isinstance(module, nn.Conv2d):
            assert module.weight.is_contiguous(memory_format=torch.channels_last)
            module.register_forward_hook(
                lambda m, a, out: orders.append(out.is_contiguous(memory_format=torch.channels_last))
            )
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(laid(x), plain(x), rtol=1e-4, atol=1e-5)
    assert orders
    assert all(orders)


def test_narrow_strided_1x1_convolutions_stay_as_they_are_on_a_cpu() -> None:
    narrow = CifarResNet(depth=8, in_channels=3, num_classes=10, width=4)
    with pytest.raises(ArgumentError, match="channels_last=true is not safe for"):
        channels_last(narrow, SingleDeviceStrategy(), True)
    channels_last(narrow, SingleDeviceStrategy(), "auto")
    assert not narrow._forward_pre_hooks
    channels_last(narrow, SingleDeviceStrategy(torch.device("meta")), True)
    assert narrow._forward_pre_hooks


def _run(rank: int, cfg: dict[str, Any]) -> None:
    lathe.training.train.train(cfg)


@pytest.mark.slow
def test_a_run_is_the_same_on_one_process_and_on_two(tmp_path: Path) -> None:
    """With channels_last on two."""
    one = new_run(tmp_path / "one", *RUN)
    two = new_run(tmp_path / "two", *RUN, "trainer.channels_last=true", "strategy=ddp", "trainer.devices=2")
    _run(0, one)
    on_ranks(_run, two)
    expected, found = (Path(cfg["paths"]["run_dir"]) for cfg in (one, two))
    assert column(found, "train/loss") == pytest.approx(column(expected, "train/loss"), rel=1e-6)
    torch.testing.assert_close(weights(found), weights(expected), rtol=1e-5, atol=1e-7)
