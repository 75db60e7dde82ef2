"""The keys of each command's YAML file, without those of the components in its groups.

`scripts/schema.py` writes them into configs/schema.json, which the launch validates against. A key of a component
is in its constructor, not here.
"""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from lathe.config.types import (
    Bits,
    Checkpoint,
    Count,
    Name,
    NonNegative,
    NonNegativeInt,
    OpenShare,
    Positive,
    PositiveShare,
    PrecisionName,
    Seed,
    Share,
    ShareBelowOne,
)

MethodKind = Literal["distillation", "structure", "masks", "quantization", "after"]  # in the order of the stages


class Component(TypedDict):
    """A node with a `_target_`, whose signature has the other keys."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]


class Nothing(TypedDict):
    """An empty group: the choice `none`."""


class Strategy(Component):
    """Keys of a strategy that the launch reads before it is built."""

    processes: NotRequired[Literal["per_device", "one"]]
    precisions: NotRequired[Annotated[list[PrecisionName], Field(min_length=1)]]
    compressions: NotRequired[list[MethodKind]]


class Method(Component):
    """Keys of a method of compression that the launch reads before it is built."""

    kind: NotRequired[MethodKind]


class Scheduler(Component):
    """The interval at which a scheduler is stepped, and its metric."""

    interval: NotRequired[Literal["step", "epoch"]]
    frequency: NotRequired[Count]
    monitor: NotRequired[Name]


class Plateau(Scheduler):
    mode: NotRequired[Literal["auto", "max", "min"]]


Duration = Annotated[
    str,
    Field(pattern=r"^\d+:\d{1,2}:\d{1,2}:\d{1,2}$", description="a time limit as DD:HH:MM:SS, such as 00:12:00:00"),
]
TimeUnits = dict[Literal["weeks", "days", "hours", "minutes", "seconds"], NonNegative]
Batches = NonNegativeInt | Share  # a number of batches, or a share of the epoch
Accelerator = Literal["auto", "cpu", "gpu", "cuda", "mps", "tpu", "hpu"]
DeviceIds = Count | Literal[-1, "auto"] | Annotated[list[NonNegativeInt], Field(min_length=1)]


class Trainer(Component):
    """Arguments that lathe's Trainer adds to Lightning's, and tighter types for some of Lightning's."""

    accelerator: Accelerator
    devices: DeviceIds
    num_nodes: Count
    enable_checkpointing: bool
    enable_progress_bar: bool
    enable_model_summary: bool
    fast_dev_run: bool | NonNegativeInt
    max_epochs: NotRequired[Annotated[int, Field(ge=-1)] | None]
    min_epochs: NotRequired[NonNegativeInt | None]
    max_steps: NotRequired[Annotated[int, Field(ge=-1)]]
    min_steps: NotRequired[NonNegativeInt | None]
    max_time: NotRequired[Duration | TimeUnits | None]
    accumulate_grad_batches: NotRequired[Count]
    gradient_clip_val: NotRequired[NonNegative | None]
    gradient_clip_algorithm: NotRequired[Literal["norm", "value"] | None]
    limit_train_batches: NotRequired[Batches | None]
    limit_val_batches: NotRequired[Batches | None]
    limit_test_batches: NotRequired[Batches | None]
    limit_predict_batches: NotRequired[Batches | None]
    overfit_batches: NotRequired[Batches]
    val_check_interval: NotRequired[Count | PositiveShare | Duration | TimeUnits | None]
    check_val_every_n_epoch: NotRequired[Count | None]
    num_sanity_val_steps: NotRequired[Annotated[int, Field(ge=-1)] | None]
    log_every_n_steps: NotRequired[Count | None]
    deterministic: NotRequired[bool | Literal["warn"] | None]
    profiler: NotRequired[Literal["simple", "advanced", "pytorch"] | None]
    reload_dataloaders_every_n_epochs: NotRequired[NonNegativeInt]
    steps_per_call: NotRequired[Count | Literal["auto"]]
    num_workers: NotRequired[NonNegativeInt | None]
    prefetch_to_device: NotRequired[bool | Literal["auto"]]
    channels_last: NotRequired[bool | Literal["auto"]]
    fused_optimizer: NotRequired[Literal[False, "auto"]]
    activation_checkpointing: NotRequired[
        Literal["none", "blocks", "sqrt", "offload"]
        | Annotated[str, Field(pattern=r"^every_[1-9]\d{0,5}$", description="every_<n>")]
    ]


class Callbacks(TypedDict):
    """Components by name; null leaves one out."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]


Loggers = Callbacks
Names = list[Name]
SomeNames = Annotated[list[Name], Field(min_length=1)]
DistinctNames = Annotated[list[Name], Field(min_length=1, json_schema_extra={"uniqueItems": True})]
Overrides = list[Name]
Sha256 = Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$", description="a SHA-256 in hexadecimal")]
# It becomes a folder below paths.log_dir, in which Lathe makes the folders that it excludes.
RunName = Annotated[
    str,
    Field(
        json_schema_extra={"pattern": r"^(?!(latest|benchmark|slurm|sweeps)$)\w[\w.+-]{0,99}$"},
        description="letters, digits and . _ - + alone, none of . - + first, at most 100, none of latest, benchmark, "
        "slurm, sweeps",
    ),
]


class Paths(TypedDict):
    data_dir: Name
    log_dir: Name


class LogPaths(TypedDict):
    log_dir: Name


class RunPaths(Paths):
    run_dir: None  # filled in; a saved configuration has it


class Launch(TypedDict):
    max_restarts: NonNegativeInt
    monitor_interval: Positive
    timeout: Positive
    nodes: Count | Annotated[str, Field(pattern=r"^\d{1,7}:\d{1,7}$", description="min:max such as 2:4")]
    endpoint: Annotated[str, Field(pattern=r"^\S+:\d+$", description="host:port")] | None
    id: (
        Annotated[str, Field(pattern=r"^[\w.:-]+$", description="a name of letters, digits and . _ -")]
        | NonNegativeInt
        | None
    )
    join_timeout: Positive
    last_call_timeout: Positive
    numa: Literal["none", "node", "socket", "exclusive", "auto"]
    threads: Count | Literal["auto"] | None


class Model(TypedDict):
    net: NotRequired[Component]
    init: NotRequired[Name | SomeNames | None]
    name: NotRequired[Annotated[str, Field(pattern=r"^[\w.]+$", description="a name that timm lists")]]
    pretrained: NotRequired[Name | bool | None]
    sha256: NotRequired[Sha256 | None]
    core: NotRequired[Name | None]
    example: NotRequired[Name | None]


class Precision(TypedDict):
    name: PrecisionName | Literal["auto"]
    matmul: NotRequired[Literal["highest", "high", "medium"]]
    init_scale: NotRequired[Positive]
    growth_interval: NotRequired[Count]


class Compile(TypedDict):
    enabled: bool
    scope: NotRequired[Literal["net", "step"]]
    mode: NotRequired[Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]]
    regional: NotRequired[bool | Literal["auto"]]
    dynamic: NotRequired[bool | None]
    fullgraph: NotRequired[bool]
    backend: NotRequired[Literal["inductor", "aot_eager", "eager"]]
    options: NotRequired[dict[str, Any] | None]


class Compression(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    stages: Annotated[list[Any], Field(min_length=1)] | None
    receipt: Literal["quick", "full", "none"]


class Sweep(TypedDict):
    axes: dict[str, Annotated[list[Any], Field(min_length=1)]] | None
    runs: Annotated[list[Overrides | Name], Field(min_length=1)] | None
    remove: NotRequired[SomeNames | None]
    jobs: Count | Literal["auto"]
    retries: NonNegativeInt
    silence: Positive | None
    resume: Name | None
    folder: Name | None
    job: NonNegativeInt | None
    space: NotRequired[dict[str, Annotated[list[Any], Field(min_length=1)] | dict[str, Any]]]
    repeats: NotRequired[dict[str, Annotated[list[Any], Field(min_length=1)]] | None]
    trials: NotRequired[Count]
    sampler: NotRequired[Literal["tpe", "gp", "cmaes", "random", "qmc", "grid", "nsga2"] | Component]
    pruner: NotRequired[Literal["none", "asha", "hyperband", "median", "percentile", "wilcoxon"] | Component]
    seed: NotRequired[Seed]
    objectives: NotRequired[SomeNames | None]
    directions: NotRequired[Literal["auto", "max", "min"] | Annotated[list[Literal["max", "min"]], Field(min_length=1)]]
    storage: NotRequired[Name | None]


class Train(TypedDict):
    name: RunName
    tags: Names
    seed: Seed
    test: bool
    objective: Name | None
    resume: Name | Literal["auto"] | None
    ckpt_path: Name | None
    ckpt_mode: Literal["weights", "trainer"]
    ckpt_sha256: Sha256 | None
    ckpt_map: dict[str, str | None] | None
    ckpt_strict: bool
    freeze: SomeNames | None
    trusted: Names
    paths: RunPaths
    data: Component
    task: Component
    model: Model
    optimizer: Component | Nothing
    scheduler: Scheduler | Nothing | None
    trainer: Trainer
    strategy: Strategy
    precision: Precision
    compile: Compile
    compression: Compression
    callbacks: Callbacks
    logger: Loggers
    launch: Launch
    sweep: Sweep | None


class LrSearch(TypedDict):
    min_lr: Positive
    max_lr: Positive
    steps: Annotated[int, Field(ge=10)]
    stop: Annotated[float, Field(gt=1)]
    output: Name | None


class LrFind(Train):
    find: LrSearch


class BatchSearch(TypedDict):
    memory: Positive | None
    start: Count
    most: Count | None
    steps: Annotated[int, Field(ge=2)]
    output: Name | None


class BatchFind(Train):
    find: BatchSearch


class Devices(TypedDict):
    accelerator: Accelerator
    devices: DeviceIds


class DevicesAndBar(Devices):
    enable_progress_bar: bool


class Evaluating(DevicesAndBar):
    inference_mode: bool | None


class OnRun(TypedDict):
    """The keys of a command on a finished run."""

    run: Name
    batch_size: Count | None
    strategy: Strategy
    launch: Launch
    paths: LogPaths
    trusted: Names


class DataFolder(TypedDict):
    folder: Name | None


class OnRunWithData(OnRun):
    data: DataFolder


class Target(TypedDict):
    """Options of export targets by name: schema.py adds the parameters of their constructors."""


class Evaluate(OnRunWithData):
    precision: Precision | None
    split: Literal["train", "val", "test"]
    checkpoint: Checkpoint
    output: Name | None
    trainer: Evaluating


class Predict(OnRun):
    precision: Precision | None
    target: Target | None
    input: Name | None
    output: Name
    export: Name | None
    checkpoint: Checkpoint
    resize: bool
    skip_bad: NonNegativeInt
    trainer: DevicesAndBar


class Compress(OnRunWithData):
    name: RunName | None
    checkpoint: Checkpoint
    compression: Compression
    trainer: Devices


class Receipt(OnRunWithData):
    baseline: Name | None
    effort: Literal["quick", "full"]
    trainer: Devices


class Sensitivity(OnRunWithData):
    checkpoint: Checkpoint
    limit_batches: Count | None
    layers: SomeNames | None
    sparsities: list[ShareBelowOne]
    bits: list[Bits]
    reestimate: NonNegativeInt
    metric: Name
    allocate: Literal["bits", "sparsity"]
    budget: Positive | None
    latency: Name | None
    trainer: DevicesAndBar


class Profile(OnRunWithData):
    precision: Precision | None
    checkpoint: Checkpoint
    warmup: Count
    steps: Annotated[int, Field(ge=2)]
    top_k: Count
    trainer: Devices


class ExportTarget(Target):
    preprocess: bool
    input_size: Annotated[list[Count], Field(min_length=2, max_length=2)] | Literal["any"] | None
    split: Literal["test", "val"]
    samples: Count | None
    axes: dict[str, dict[NonNegativeInt, Name]] | None
    tolerance: Positive | None
    agreement: Share | None
    max_drop: NonNegative | None


class Export(OnRunWithData):
    checkpoint: Checkpoint
    target: ExportTarget
    trainer: Devices


class OneProcess(TypedDict):
    accelerator: Literal["cpu", "gpu"]
    devices: Literal[1]


class Serve(OnRun):
    target: Target | None
    export: Name | None
    checkpoint: Checkpoint
    batch_size: None  # type: ignore[misc]  # what comes together is computed together
    host: Name
    hosts: Names
    port: Annotated[int, Field(ge=0, le=65535)]
    api_key: Name | int | None
    workers: Count | Literal["auto"]
    threads: Count | None
    batch_timeout: NonNegative
    max_batch_size: Count
    top_k: Count
    max_queue: Count
    max_connections: Count
    max_body_bytes: Count
    max_pixels: Count
    max_samples: Count
    max_tokens: Count
    request_timeout: Positive
    header_timeout: Positive
    body_timeout: Positive
    keep_alive_timeout: Positive
    health_timeout: Positive
    stop_timeout: Positive
    load_timeout: Positive
    trainer: OneProcess


class Runs(TypedDict):
    runs: DistinctNames | Name | None
    where: Names
    since: Name | None
    sort: Name
    limit: Count | None
    columns: DistinctNames | None
    output: Name | None
    compare: Annotated[list[Name], Field(min_length=2, max_length=2)] | None
    points: Count
    tag: Names
    untag: Names
    archive: Name | None
    delete: Literal["unfinished", "failed", "pruned", "complete"] | None
    yes: bool
    paths: LogPaths


class Reproduce(TypedDict):
    run: Name
    code: Literal["recorded", "current"]
    data: DataFolder
    output: Name | None
    trusted: Names
    paths: LogPaths


class Judge(TypedDict):
    baseline: str
    candidate: str
    metric: Name | None
    direction: Literal["max", "min"] | None
    budget: Annotated[int, Field(ge=2)]
    risk: OpenShare
    seed: Seed
    name: RunName
    output: Name | None
    paths: LogPaths


class GpuCheck(TypedDict):
    accelerator: Literal["cpu", "gpu"]
    only: DistinctNames | None
    timeout: Positive
    overrides: Overrides
    output: Name | None
    paths: LogPaths


class Images(TypedDict):
    folder: Name | None
    channels: Annotated[int, Field(ge=1, le=3)]
    image_size: Count | None
    val_size: NonNegativeInt
    test_size: NonNegativeInt
    split_seed: Seed


class Tars(TypedDict):
    folder: Name | None
    num_classes: Count | None


class MakeShards(TypedDict):
    data: Component
    output: Name
    overwrite: bool
    shard_size: Count
    encoding: Literal["png", "npy"]
    images: Images
    tars: Tars
    seed: Seed
    paths: Paths


class PrepareTokens(TypedDict):
    input: Name
    output: Name
    overwrite: bool
    suffixes: DistinctNames
    separator: Annotated[str, Field(min_length=1, description="the text between two documents")] | None
    tokenizer: Name
    val_share: OpenShare
    test_share: OpenShare
    split_seed: Seed
    paths: Paths


class Report(TypedDict):
    runs: Name | DistinctNames
    metric: Name | DistinctNames | None
    by: Name | DistinctNames | None
    baseline: Name | float | bool | None
    direction: Literal["max", "min"] | None
    columns: DistinctNames | None
    interval: Literal["t", "bootstrap"]
    confidence: OpenShare
    seed: Seed
    formats: list[Literal["markdown", "csv", "latex", "html"]]
    output: Name | None
    paths: LogPaths


class Support(TypedDict):
    processes: Count
    steps: Count
    strategies: SomeNames
    precisions: Annotated[list[PrecisionName], Field(min_length=1)]
    compiles: SomeNames
    inductor: list[PrecisionName]
    models: SomeNames | dict[str, Overrides]
    part: Literal["plain", "compression", "all"]
    compressions: Names | dict[str, Overrides]
    overrides: Overrides
    output: Name | None
    launch: Launch
    paths: LogPaths


Training = Literal["scaling", "memory", "overhead", "gpu", "parallel", "precision", "compile"]
Suite = Literal[Training, "inference", "loaders", "trainer", "int8", "cli"]
Benchmark = TypedDict(  # `assert` is a keyword
    "Benchmark",
    {
        "suite": Suite,
        "trusted": Names,
        "base": Name | None,
        "run": Name | None,
        "targets": DistinctNames | None,
        "batches": Annotated[list[Count], Field(min_length=1)] | None,
        "seconds": Positive | None,
        "processes": Annotated[list[Count], Field(min_length=1)] | None,
        "strategies": Names | None,
        "workers": Annotated[list[NonNegativeInt], Field(min_length=1)] | None,
        "rounds": Count | None,
        "batch_size": Count | None,
        "epochs": Count | None,
        "qat": Count | None,
        "steps": Annotated[int, Field(ge=3)] | None,
        "warmup": NonNegativeInt | None,
        "threads": Count | Annotated[list[Count], Field(min_length=1)] | None,
        "accelerator": Literal["cpu", "gpu"] | None,
        "timeout": Positive,
        "assert": bool,
        "thresholds": dict[str, NonNegative] | None,
        "overrides": Overrides,
        "output": Name | None,
        "paths": LogPaths,
    },
)

# By group: what its components have in addition to the parameters of their signatures.
FACTS: dict[str, Any] = {"strategy": Strategy, "compression": Method, "scheduler": Scheduler, "trainer": Trainer}

COMMANDS: dict[str, Any] = {
    "train": Train,
    "evaluate": Evaluate,
    "predict": Predict,
    "compress": Compress,
    "receipt": Receipt,
    "sensitivity": Sensitivity,
    "profile": Profile,
    "export": Export,
    "serve": Serve,
    "lr_find": LrFind,
    "batch_find": BatchFind,
    "runs": Runs,
    "reproduce": Reproduce,
    "judge": Judge,
    "gpu_check": GpuCheck,
    "benchmark": Benchmark,
    "make_shards": MakeShards,
    "prepare_tokens": PrepareTokens,
    "report": Report,
    "support": Support,
}
