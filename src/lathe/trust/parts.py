"""The parts that a saved configuration may build, by kind and by name. A closed list: a class is added here once its
constructor has been read, and takes no path, address, command or function from a word. tests/hostile holds it against
the installed packages.
"""

import re

# Rooms of this project whose classes moved between files: a name may go through any module of its room.
LATHE: dict[str, tuple[str, str]] = {
    "task": ("tasks", "ClassificationTask LanguageModellingTask LightningTask MultiLabelTask RegressionTask"),
    "module": ("nets", "Airbench CifarResNet DeepMLP GPT MLP ResNet ViT WideResNet"),
    "optimizer": ("optim", "LAMB LARS Muon"),
    "data": ("data", "DatasetDataModule DocumentDataModule ImageDataModule ShardDataModule TokenDataModule"),
    "data part": (
        "data",
        "Augment Cifar ColorJitter CutMix Cutout Digits FashionMnist ImageFolder Mixup RandAugment RandomCrop "
        "RandomErasing RandomFlip RandomResizedCrop Shards Synthetic SyntheticDocuments SyntheticTokens TokenFiles "
        "TrivialAugmentWide",
    ),
    "callback": (
        "callbacks",
        "Alerts Checkpoint DeviceStats EMA HardSamples ImageSizes ModelSummary NanGuard Preemption Progress Samples "
        "Throughput TorchProfiler WhatIf Whitening",
    ),
    "method": (
        "callbacks",
        "Distill Lottery PruneChannels Prune PruneNM PruneStructured PTQDynamic PTQStatic QAT RigL WeightOnly",
    ),
    "strategy": ("strategies", "DDP DeepSpeed FSDP ModelSplit Pipeline TensorParallel ThreeD"),
}
# Functions, what lies in legacy/, and losses, by their whole names.
FUNCTIONS: dict[str, str] = {
    "module": "lathe.nets.timm_net lathe.tasks.Weighted lathe.tasks.loss.Weighted",
    "optimizer": "lathe.optim.build_optimizer",
    "scheduler": (
        "lathe.optim.constant lathe.optim.cosine lathe.optim.cosine_restarts lathe.optim.linear lathe.optim.one_cycle "
        "lathe.optim.step"
    ),
    "strategy": "lathe.strategies.auto lathe.legacy.DP lathe.legacy.Horovod",
    "logger": (
        "lathe.loggers.aim lathe.loggers.comet lathe.loggers.csv lathe.loggers.mlflow lathe.loggers.tensorboard "
        "lathe.loggers.wandb"
    ),
    "trainer": "lightning.pytorch.Trainer lightning.Trainer lightning.pytorch.trainer.Trainer",
}
# Layers and losses of torch.nn. Not here: Module itself, and DataParallel, which is a strategy.
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
OPTIMIZERS = "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop SGD SparseAdam"
# Not here: those that take functions.
SCHEDULERS = (
    "ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR ExponentialLR LinearLR "
    "MultiStepLR OneCycleLR PolynomialLR ReduceLROnPlateau SequentialLR StepLR"
)
# Not here: metrics with a pretrained net, which they download.
METRICS = """
AUROC Accuracy AveragePrecision CalibrationError CohenKappa ConfusionMatrix CosineSimilarity ExactMatch
ExplainedVariance F1Score FBetaScore HammingDistance HingeLoss JaccardIndex KLDivergence LogCoshError MatthewsCorrCoef
MaxMetric MeanAbsoluteError MeanAbsolutePercentageError MeanMetric MeanSquaredError MeanSquaredLogError
MetricCollection MinMetric PearsonCorrCoef Perplexity Precision PrecisionRecallCurve R2Score ROC Recall
SpearmanCorrCoef Specificity StatScores SumMetric
"""
CLASSIFICATION = """
AUROC Accuracy AveragePrecision CalibrationError CohenKappa ConfusionMatrix ExactMatch F1Score FBetaScore
HammingDistance HingeLoss JaccardIndex MatthewsCorrCoef Precision PrecisionRecallCurve ROC Recall Specificity
StatScores
"""
# Not here: those that take folders or functions (ModelCheckpoint, LambdaCallback, BasePredictionWriter, ...), or hand
# what they are given to another constructor (WeightAveraging, EMAWeightAveraging).
CALLBACKS = (
    "DeviceStatsMonitor EarlyStopping GradientAccumulationScheduler LearningRateMonitor ModelSummary RichModelSummary "
    "RichProgressBar StochasticWeightAveraging TQDMProgressBar Timer"
)
# Not here: those of servers, whose settings could name another server to send keys to. CSVLogger and TensorBoardLogger
# write files alone.
LOGGERS = "CSVLogger TensorBoardLogger"

WITHIN = r"(?:\.[a-z][a-z0-9_]*)*"  # modules between a package and a class


def _one_of(names: str) -> str:
    return "(?:" + "|".join(names.split()) + ")"


def _patterns() -> dict[str, re.Pattern[str]]:
    forms: dict[str, list[str]] = {}
    for kind, (room, names) in LATHE.items():
        forms.setdefault(kind, []).append(rf"lathe\.{room}{WITHIN}\.{_one_of(names)}")
    for kind, names in FUNCTIONS.items():
        forms.setdefault(kind, []).append(_one_of(names.replace(".", r"\.")))
    prefixes = "(?:Binary|Multiclass|Multilabel)"
    forms["module"] += [
        rf"torch\.nn(?:\.modules{WITHIN})?\.{_one_of(LAYERS)}",
        rf"torchmetrics\.{_one_of(METRICS)}",
        rf"torchmetrics\.(?:classification|regression|text|aggregation)\.{_one_of(METRICS)}",
        rf"torchmetrics\.classification\.{prefixes}{_one_of(CLASSIFICATION)}",
    ]
    forms["optimizer"].append(rf"torch\.optim(?:\.[a-z_]+)?\.{_one_of(OPTIMIZERS)}")
    forms["scheduler"].append(rf"torch\.optim\.lr_scheduler\.{_one_of(SCHEDULERS)}")
    forms["callback"].append(rf"lightning\.pytorch\.callbacks{WITHIN}\.{_one_of(CALLBACKS)}")
    forms["logger"].append(rf"lightning\.pytorch\.loggers{WITHIN}\.{_one_of(LOGGERS)}")
    return {kind: re.compile("|".join(patterns)) for kind, patterns in forms.items()}


LISTED = _patterns()
# A net may be made of other modules, and a LightningModule also be given what makes its optimizer and schedule.
NET_PARTS = ("module", "optimizer", "scheduler")


def listed(name: str, kind: str) -> bool:
    """Whether `name` is a part of this kind that any saved configuration may build."""
    return any(LISTED[one].fullmatch(name) is not None for one in (NET_PARTS if kind == "net part" else (kind,)))


def kinds_of(name: str) -> list[str]:
    """The kinds as which `name` is listed."""
    return [kind for kind in LISTED if listed(name, kind)]
