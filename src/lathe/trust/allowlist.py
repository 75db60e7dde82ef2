"""The allow-list: the classes and functions that a saved configuration may build, by key, and the check against it.

A saved configuration may come from someone else, and what it names is imported and called. A class of another library
is on the list only if its constructor takes no path, address, command or function.
"""

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lathe.config.schema import canonical, definitions
from lathe.configs import SOURCE
from lathe.errors import UserError, require
from lathe.trust import GETTERS, carried, join_key, names_in, read_signed, walk_names
from lathe.trust.safe_yaml import printable

# Each kind of component in words, and its base classes as (module, name); kinds without one are not checked.
KINDS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "task": ("a task, which is a LightningModule", [("lightning.pytorch", "LightningModule")]),
    "module": ("a torch module", [("torch.nn", "Module")]),
    "net part": ("a part of a net", []),
    "optimizer": ("an optimizer", [("torch.optim", "Optimizer")]),
    "scheduler": ("a learning-rate scheduler", [("torch.optim.lr_scheduler", "LRScheduler")]),
    "trainer": ("Lightning's Trainer", [("lightning.pytorch", "Trainer")]),
    "strategy": ("a strategy", [("lightning.pytorch.strategies", "Strategy")]),
    "data": ("a data module", [("lightning.pytorch", "LightningDataModule"), ("torch.utils.data", "DataLoader")]),
    "data part": ("a part of a data module", []),
    "callback": ("a callback", [("lightning.pytorch", "Callback")]),
    "logger": ("a logger", [("lightning.pytorch.loggers", "Logger")]),
}
# The kind that each key takes; the first pattern counts. Other keys take no component.
PLACES = [
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"task", "task"),
        (r"task\..+", "module"),
        (r"model\.net[.\[].+", "net part"),
        (r"model\..+", "module"),
        (r"optimizer(?:\.kind)?", "optimizer"),
        (r"scheduler(?:\.scheduler)?(?:\.schedulers\[\d+\])*", "scheduler"),
        (r"trainer", "trainer"),
        (r"strategy", "strategy"),
        (r"data", "data"),
        (r"data\..+", "data part"),
        (r"callbacks\.[^.\[]+", "callback"),
        (r"callbacks\.[^.\[]+[.\[].+", "module"),
        (r"logger\.[^.\[]+", "logger"),
        (r"compression\.(?!stages$|receipt$)[^.\[]+", "callback"),
        (r"compression\.[^.\[]+\.teacher(?:\[\d+\])?\.net(?:[.\[].+)?", "module"),
    )
]
NET_PARTS = ("module", "optimizer", "scheduler")  # a LightningModule may be given its optimizer and schedule
# Components in configs/schema.json, by canonical name.
SCHEMA = {
    "task": r"lathe\.tasks\.\w+Task",
    "module": r"lathe\.nets\.\w+|lathe\.tasks\.Weighted",
    "optimizer": r"lathe\.optim\.([A-Z]\w*|build_optimizer)|torch\.optim\.(?!ReduceLROnPlateau)[A-Z]\w*",
    "scheduler": r"lathe\.optim\.(?!build_optimizer)[a-z]\w*",
    "data": r"lathe\.data\.\w+DataModule",
    "data part": r"lathe\.data\.(?!\w+DataModule$)[A-Z]\w*",
    "callback": r"lathe\.(callbacks|compression|contrib)\.[A-Z]\w*",
    "strategy": r"lathe\.strategies\.([A-Z]\w*|auto)|lathe\.contrib\.[A-Z]\w*",
    "logger": r"lathe\.loggers\.\w+",
}
# Layers and losses of torch.nn. Not Module itself, and not DataParallel, which is a strategy.
LAYERS = """
AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveLogSoftmaxWithLoss AdaptiveMaxPool1d AdaptiveMaxPool2d
AdaptiveMaxPool3d AlphaDropout AvgPool1d AvgPool2d AvgPool3d BCELoss BCEWithLogitsLoss BatchNorm1d BatchNorm2d
BatchNorm3d Bilinear CELU CTCLoss ChannelShuffle CircularPad1d CircularPad2d CircularPad3d ConstantPad1d ConstantPad2d
ConstantPad3d Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d CosineEmbeddingLoss
CosineSimilarity CrossEntropyLoss CrossMapLRN2d Dropout Dropout1d Dropout2d Dropout3d ELU Embedding EmbeddingBag
FeatureAlphaDropout Flatten Fold FractionalMaxPool2d FractionalMaxPool3d GELU GLU GRU GRUCell GaussianNLLLoss
GroupNorm Hardshrink Hardsigmoid Hardswish Hardtanh HingeEmbeddingLoss HuberLoss Identity InstanceNorm1d
InstanceNorm2d InstanceNorm3d KLDivLoss L1Loss LPPool1d LPPool2d LPPool3d LSTM LSTMCell LayerNorm LazyBatchNorm1d
LazyBatchNorm2d LazyBatchNorm3d LazyConv1d LazyConv2d LazyConv3d LazyConvTranspose1d LazyConvTranspose2d
LazyConvTranspose3d LazyInstanceNorm1d LazyInstanceNorm2d LazyInstanceNorm3d LazyLinear LeakyReLU Linear
LocalResponseNorm LogSigmoid LogSoftmax MSELoss MarginRankingLoss MaxPool1d MaxPool2d MaxPool3d MaxUnpool1d
MaxUnpool2d MaxUnpool3d Mish ModuleDict ModuleList MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss
MultiheadAttention NLLLoss PReLU PairwiseDistance PixelShuffle PixelUnshuffle PoissonNLLLoss RMSNorm RNN RNNCell RReLU
ReLU ReLU6 ReflectionPad1d ReflectionPad2d ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d SELU
Sequential SiLU Sigmoid SmoothL1Loss SoftMarginLoss Softmax Softmax2d Softmin Softplus Softshrink Softsign
SyncBatchNorm Tanh Tanhshrink Threshold Transformer TransformerDecoder TransformerDecoderLayer TransformerEncoder
TransformerEncoderLayer TripletMarginLoss Unflatten Unfold Upsample UpsamplingBilinear2d UpsamplingNearest2d ZeroPad1d
ZeroPad2d ZeroPad3d
"""
# Not those that take functions.
SCHEDULERS = (
    "ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR ExponentialLR LinearLR "
    "MultiStepLR OneCycleLR PolynomialLR ReduceLROnPlateau SequentialLR StepLR"
)
# Not metrics that download a pretrained net.
METRICS = """
AUROC Accuracy AveragePrecision CalibrationError CohenKappa ConfusionMatrix CosineSimilarity ExactMatch
ExplainedVariance F1Score FBetaScore HammingDistance HingeLoss JaccardIndex KLDivergence LogCoshError MatthewsCorrCoef
MaxMetric MeanAbsoluteError MeanAbsolutePercentageError MeanMetric MeanSquaredError MeanSquaredLogError
MetricCollection MinMetric PearsonCorrCoef Perplexity Precision PrecisionRecallCurve R2Score ROC Recall
SpearmanCorrCoef Specificity StatScores SumMetric
"""
# Not those that take folders or functions (ModelCheckpoint, LambdaCallback, BasePredictionWriter, ...), or pass their
# arguments to another constructor (WeightAveraging, EMAWeightAveraging).
CALLBACKS = (
    "DeviceStatsMonitor EarlyStopping GradientAccumulationScheduler LearningRateMonitor ModelSummary RichModelSummary "
    "RichProgressBar StochasticWeightAveraging TQDMProgressBar Timer"
)
# Not those of servers: their settings could name another server, which would receive API keys.
LOGGERS = "CSVLogger TensorBoardLogger"

MODULES = r"(?:\.[a-z][a-z0-9_]*)*"  # modules between a package and a class


def _one_of(names: str) -> str:
    return "(?:" + "|".join(names.split()) + ")"


LIBRARIES = {
    "net part": (r"builtins\.tuple",),
    "data part": (r"builtins\.tuple",),
    "module": (
        rf"torch\.nn(?:\.modules{MODULES})?\.{_one_of(LAYERS)}",
        rf"torchmetrics(?:\.(?:classification|regression|text|aggregation))?\.{_one_of(METRICS)}",
        rf"torchmetrics\.classification\.(?:Binary|Multiclass|Multilabel){_one_of(METRICS)}",
    ),
    "scheduler": (rf"torch\.optim\.lr_scheduler\.{_one_of(SCHEDULERS)}",),
    "callback": (rf"lightning\.pytorch\.callbacks{MODULES}\.{_one_of(CALLBACKS)}",),
    "logger": (rf"lightning\.pytorch\.loggers{MODULES}\.{_one_of(LOGGERS)}",),
    "trainer": (r"lightning\.(?:pytorch\.(?:trainer\.)?)?Trainer",),
}
GETTERS_AT = ("optimizer", "module", "net part", "data part")
OPTIONS = {"_partial_": (bool,), "_convert_": (str, bool), "_recursive_": (bool,), "_args_": (list,)}
FOLDER_NAME = re.compile(r"(?!\.{1,2}$)[^/\\\0]+")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+", re.ASCII)


class Finding(NamedTuple):
    """A `name` at `key` that a saved configuration may not build; `why` is empty if `trusted` may name it."""

    key: str
    name: str
    why: str = ""


def kinds_of(name: str) -> list[str]:
    """Return the kinds of a name on the allow-list; [] for other names."""
    return [kind for kind in KINDS if _is_listed(name, kind)]


def is_allowed(name: str, kind: str) -> bool:
    """True if any saved configuration may build `name` where a key takes this kind."""
    return any(_is_listed(name, candidate) for candidate in ((kind, *NET_PARTS) if kind == "net part" else (kind,)))


def _is_listed(name: str, kind: str) -> bool:
    if any(re.fullmatch(pattern, name) for pattern in LIBRARIES.get(kind, ())):
        return True
    short = canonical(name)
    # a class may be named through its module, which exists because the name is in the schema; a function may not
    is_named = name == short or re.fullmatch(rf"(?:lathe|torch)\.\w+{MODULES}\.[A-Z]\w*", name)
    return bool(is_named and short in definitions() and re.fullmatch(SCHEMA.get(kind, r"(?!)"), short))


def kind_at(key: str) -> str | None:
    """Return the kind of component that a key takes; None if it takes none."""
    return next((kind for pattern, kind in PLACES if pattern.fullmatch(key)), None)


def is_trusted(name: str, trusted: list[str]) -> bool:
    """True if `name` is one of `trusted`, or is in one of them."""
    return any(f"{name}.".startswith(f"{item}.") for item in trusted)


def findings(config: Any, trusted: list[str], typed: dict[str, str]) -> Iterator[Finding]:
    """Give each name in a saved configuration that it may not build.

    `trusted` are packages and names that the user trusts, `typed` the names at the same keys of the current command.
    """
    yield from _invalid_options(config, "")
    for key, name, use in walk_names(config, ""):
        kind = kind_at(key.removesuffix(".path") if use == "path" else key)
        if not isinstance(name, str):
            yield Finding(key, repr(name)[:80], "which is not a name")
        elif use == "address":
            if name not in trusted and typed.get(key) != name:
                yield Finding(key, name)
        elif kind is None:
            yield Finding(key, name, "where no part belongs")
        elif not NAME.fullmatch(name) or "__" in name:
            yield Finding(key, name[:200], "which is not the name of a class or function")
        elif use == "getter":
            if kind not in GETTERS_AT:
                yield Finding(key, name, f"where {KINDS[kind][0]} is built, not looked up")
        elif use != "init" and is_allowed(name, kind):
            continue
        elif use != "init" and kinds_of(name) and name not in trusted:
            yield Finding(key, name, f"where {KINDS[kind][0]} belongs")
        elif not (typed.get(key) == name or is_trusted(name, trusted) or is_user_code(name)):
            yield Finding(key, name)


def _invalid_options(node: Any, key: str) -> Iterator[Finding]:
    """Give keys that are not text, and Hydra's options where Lathe writes none."""
    if isinstance(node, list):
        for number, value in enumerate(node):
            yield from _invalid_options(value, f"{key}[{number}]")
    for name, value in node.items() if isinstance(node, dict) else ():
        full = join_key(key, name)
        if not isinstance(name, (str, int)) or isinstance(name, bool) or (not key and not isinstance(name, str)):
            yield Finding(full, repr(name)[:80], "which is not a key")
        elif isinstance(name, str) and re.fullmatch(r"_\w*_", name) and name != "_target_":
            fits = "_target_" in node and name in OPTIONS and isinstance(value, OPTIONS[name])
            if not fits or (name == "_args_" and kind_at(key) not in ("module", "net part")):
                yield Finding(full, name, "which Lathe never writes there")
        yield from _invalid_options(value, full)


def checked_config(path: Path, where: str, kinds: bool = True) -> dict[str, Any]:
    """Read a run's config.yaml and check that all its names may be built.

    `where` begins each message. With `kinds`, the user's and trusted classes are imported, and must be of the kind that
    their key takes; without it the result is not for building.
    Raises UserError if it is not a configuration, or names what it may not build, and OSError if it can't be read.
    """
    file = f"{where}: its config.yaml"
    config, is_signed = read_signed(path, file)
    if not isinstance(config, dict):
        raise UserError(f"{file} can't be read as a configuration.")
    name = config.get("name", "x")
    is_name = isinstance(name, str) and FOLDER_NAME.fullmatch(name)
    require(bool(is_name), f"{file} has name={printable(repr(name))}, which is not the name of a folder.")
    trusted, typed = carried()
    if is_signed:  # its names were allowed in a command of this user
        typed = typed | names_in(config)
    refused = list(findings(config, trusted, typed))
    for key, name, why in refused:
        item = f"`{printable(name)}` at {printable(key)}"
        require(not why, f"{file} names {item}, {why}: use a run directory as Lathe wrote it.")
    if refused:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        names = sorted({finding.name for finding in refused})[:8]
        raise UserError(
            f"{file} names `{printable(refused[0].name)}` at {printable(refused[0].key)}{more}, which a saved "
            f"configuration may not build; if you trust it, add trusted=[{','.join(map(printable, names))}]."
        )
    for key, named in names_in(config).items() if kinds else ():
        kind = kind_at(key.removesuffix(".path"))
        if kind is None or named in GETTERS or is_allowed(named, kind) or typed.get(key) == named:
            continue
        is_init = key.startswith("model.init")
        wrong = wrong_kind(named, "" if is_init else kind, named in trusted)
        require(
            wrong is None,
            f"{file} names `{printable(named)}` at {printable(key)}, which takes "
            f"{'an init' if is_init else KINDS[kind][0]}, and {wrong}: it is not built.",
        )
    config.pop("trusted", None)
    return {str(key): value for key, value in config.items()}


# The user's own packages next to this one under `src/`


def is_user_code(name: str) -> bool:
    """True if a module under this project's `src/` could define `name`.

    Only files are looked at, and where Python would find the package: another one of that name may come first.
    """
    folder, (package, *rest) = SOURCE, name.split(".")
    if folder is None or package == "lathe" or not rest:
        return False
    path = folder.joinpath(package, *rest[:-1])
    file = next((module for module in (path.with_suffix(".py"), path / "__init__.py") if module.is_file()), None)
    if file is None or not file.resolve().is_relative_to(folder):
        return False
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = [spec.origin] if spec.origin and spec.has_location else list(spec.submodule_search_locations or [])
    return bool(places) and all(Path(location).resolve().is_relative_to(folder) for location in places)


def wrong_kind(name: str, kind: str, exact: bool) -> str | None:
    """Import `name` and return why it is not a component of `kind`; None if it is one or can't be imported.

    Without `exact`, which means that the user typed the whole name, its package must define it: imports of other
    packages in a module do not count.
    """
    module, _, attribute = name.rpartition(".")
    package = name.split(".")[0]
    try:
        value = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's module may raise anything, and does so again when it is built
        leads_on = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        return "it is not a class or function of a module" if leads_on and not exact else None
    if not exact and str(getattr(value, "__module__", None)).split(".")[0] != package:
        return f"{package} does not define it"
    if not inspect.isclass(value):
        return None if callable(value) else "it is neither a class nor a function"
    named = KINDS[kind][1] if kind else []
    bases = tuple(getattr(importlib.import_module(base_module), base) for base_module, base in named)
    if not bases or issubclass(value, bases):
        return None
    return f"it is not a {' or '.join(base.__name__ for base in bases)}"
