"""Warnings during a run, in the log and by webhook."""

import json
import logging
import math
import os
import platform
import queue
import re
import shutil
import threading
from collections import deque
from pathlib import Path
from statistics import mean, median
from time import monotonic
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import psutil
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from pydantic import Field
from torch import Tensor

from lathe.callbacks.device_stats import gpus_of
from lathe.callbacks.throughput import Throughput
from lathe.config.types import OpenShare, Positive
from lathe.config.validation import validated
from lathe.data.steps import reached, steps_before
from lathe.errors import require
from lathe.measure.hardware import Gpu, NoNvml, open_gpu
from lathe.measure.shards import local

log = logging.getLogger(__name__)
KEY = "callbacks.alerts"
ENV = "env:"  # prefix of the name of an environment variable that holds the address
URL = r"https?://(?:[^\s/@:]+|\[[\da-fA-F:.]+\])(?::\d{1,5})?(?:[/?]\S*)?"  # without a login
MOST = 100  # queued messages: more are dropped
WINDOWS = 50  # throughput windows, whose median is the reference
FEWEST = 3  # windows before one is compared
LOSSES = 5  # logged steps, whose mean is compared: one batch is noisy
EVERY = 1.0  # seconds between two checks of temperature and disk
FLOOR = 0.01  # of the first loss: below it, a rising loss counts as zero


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Treat a redirect as an error: messages are sent only to the given address."""


class Webhook:
    """Post JSON to an http or https address in a thread; warn of the first message that is lost.

    Log messages contain only host and port: the rest of the address is often a secret.
    """

    def __init__(self, url: str, timeout: float) -> None:
        if url.startswith(ENV):
            key, url = f"{KEY}.url={url}", os.environ.get(url.removeprefix(ENV), "")
            require(re.fullmatch(URL, url) is not None, f"{key}: the environment has no http address there: set it.")
        self._url, self._timeout, self._warned = url, timeout, False
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MOST)
        self._thread = threading.Thread(target=self._run, name="lathe-webhook", daemon=True)
        self._thread.start()

    def post(self, message: dict[str, Any] | None) -> None:
        """Queue a message; None ends the thread."""
        try:
            self._waiting.put_nowait(None if message is None else json.dumps(message, allow_nan=False).encode())
        except queue.Full:
            self._warn(f"more than {MOST} messages wait")

    def close(self) -> None:
        """Wait for queued messages, at most `timeout`."""
        self.post(None)
        self._thread.join(self._timeout)

    def _run(self) -> None:
        opener = build_opener(_NoRedirect)
        while (body := self._waiting.get()) is not None:
            headers = {"Content-Type": "application/json", "User-Agent": "lathe"}
            try:
                request = Request(self._url, body, headers)  # noqa: S310  # its scheme was checked
                opener.open(request, timeout=self._timeout).close()
            except HTTPError as error:
                self._warn(f"status {error.code}")
                error.close()
            except Exception as error:  # the thread must not die; some errors contain the address
                self._warn(str(error.reason) if isinstance(error, URLError) else type(error).__name__)

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            host = urlsplit(self._url).netloc
            log.warning("%s.url: %s did not take a message (%s). Later losses are not reported.", KEY, host, reason)


class Alerts(Callback):
    """Warn if a run slows down, its loss rises, the device is hot or the disk is nearly full.

    Rank 0 checks at logged steps, writes each warning to the log and posts it to `url`, once until the condition has
    recovered. A message that fails does not stop training.

    - throughput: a window of `Throughput` is below 1 - `throughput_drop` times the median of the previous windows.
    - loss: the mean of the last 5 logged training losses (rank 0's batches) is not finite, or exceeds the lowest such
      mean by more than `loss_rise` - 1 times that mean. Below a hundredth of the first loss, nothing is a rise.
    - temperature: of rank 0's GPUs by NVML; without a GPU, of the hottest sensor that psutil reads.
    - disk: free space at the run directory.

    A message is JSON: `text` (a sentence, which Slack and Mattermost show), `kind`, `value`, `limit`, `step`, `run` and
    `host`.

    Args:
        url: an http or https address, or env:NAME for an environment variable that holds it; None posts nothing.
        throughput_drop, loss_rise, temperature, disk_free_gb: limits (degrees Celsius, 10^9 bytes); None: no check.
        timeout: seconds that the address may take to answer.
    """

    @validated
    def __init__(
        self,
        url: Annotated[
            str,
            Field(pattern=rf"^(env:[A-Za-z_]\w*|{URL})$", description="an http:// or https:// address, or env:NAME"),
        ]
        | None = None,
        throughput_drop: OpenShare | None = 0.5,
        loss_rise: Annotated[float, Field(gt=1)] | None = 2.0,
        temperature: Annotated[float, Field(ge=0, le=200)] | None = 90.0,
        disk_free_gb: Positive | None = 5.0,
        timeout: Annotated[float, Field(gt=0, le=600)] = 10.0,
    ) -> None:
        self.throughput_drop, self.loss_rise = throughput_drop, loss_rise
        self.temperature, self.disk_free_gb = temperature, disk_free_gb
        first = getattr(rank_zero_only, "rank", 0) == 0
        self._webhook = Webhook(url, timeout) if url is not None and first else None
        if self._webhook is not None and not str(url).startswith(ENV):
            print(f"{KEY}.url: config.yaml keeps this address; url={ENV}NAME keeps the name of a variable.", flush=True)
        self._gpus: list[Gpu] = []
        self._throughput: Throughput | None = None
        self._clear()

    def _clear(self) -> None:
        self._on: set[str] = set()  # reported and not recovered
        self._windows = 0
        self._rates: deque[float] = deque(maxlen=WINDOWS)
        self._losses: deque[float] = deque(maxlen=LOSSES)
        self._first = self._lowest = math.inf
        self._looked, self._logged = -math.inf, 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
        self._throughput = next((callback for callback in callbacks if isinstance(callback, Throughput)), None)
        message = f"{KEY}.throughput_drop={self.throughput_drop} needs callbacks.throughput: add it, or set null."
        require(self.throughput_drop is None or self._throughput is not None, message)
        if self.temperature is None or not trainer.is_global_zero:
            return
        reason = "this machine has no sensor that psutil can read"
        try:
            self._gpus = [open_gpu(device.index or 0) for device in gpus_of(trainer)]
        except NoNvml as error:
            self._gpus, reason = [], str(error).rstrip(".")
        if self._celsius() is None:
            print(f"{KEY}.temperature is not looked at: {reason}.", flush=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clear()

    def skippable_steps(self, trainer: Trainer) -> float:
        """Count the steps before the next logged one."""
        return steps_before(trainer, trainer.log_every_n_steps)  # type: ignore[attr-defined]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        step = trainer.global_step
        if not trainer.is_global_zero or not interval or not reached(trainer, interval) or step == self._logged:
            return
        self._logged = step
        self._look_at_throughput(trainer)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.loss_rise is not None and isinstance(loss, Tensor) and local(loss).numel() == 1:
            self._look_at_loss(trainer, float(local(loss)), self.loss_rise)
        if monotonic() - self._looked >= EVERY:
            self._look_at_machine(trainer)
            self._looked = monotonic()

    def _look_at_throughput(self, trainer: Trainer) -> None:
        if self.throughput_drop is None or self._throughput is None:
            return
        windows, rate = self._throughput.newest
        if windows == self._windows or rate is None:
            return
        self._windows = windows
        if len(self._rates) >= FEWEST:
            usual = median(self._rates)
            limit = (1 - self.throughput_drop) * usual
            text = f"throughput is {rate:.4g} per second, below {limit:.4g}: the median was {usual:.4g}"
            self._judge(trainer, "throughput", rate < limit, text, rate, limit)
        self._rates.append(rate)

    def _look_at_loss(self, trainer: Trainer, loss: float, rise: float) -> None:
        self._losses.append(loss)
        if len(self._losses) < LOSSES:
            return
        now = mean(self._losses)
        if math.isinf(self._first) and math.isfinite(now):
            self._first = self._lowest = now
        # also right for negative losses
        limit = self._lowest + (rise - 1) * max(abs(self._lowest), FLOOR * abs(self._first))
        text = f"the mean training loss of {LOSSES} logged steps is {now:.4g}"
        if math.isfinite(now):
            text += f", above {limit:.4g}: the lowest was {self._lowest:.4g}"
        self._judge(trainer, "loss", not math.isfinite(now) or now > limit, text, now, limit)
        if now < self._lowest:
            self._lowest = now

    def _look_at_machine(self, trainer: Trainer) -> None:
        celsius = self._celsius() if self.temperature is not None else None
        if celsius is not None and self.temperature is not None:
            of = "the GPU" if self._gpus else "the hottest sensor"
            text = f"{of} has {celsius:.0f} degrees Celsius, above {self.temperature:g}"
            self._judge(trainer, "temperature", celsius > self.temperature, text, celsius, self.temperature)
        if self.disk_free_gb is not None:
            free = shutil.disk_usage(trainer.default_root_dir).free / 1e9
            text = f"the disk of the run has {free:.3g} GB left, below {self.disk_free_gb:g}"
            self._judge(trainer, "disk", free < self.disk_free_gb, text, free, self.disk_free_gb)

    def _celsius(self) -> float | None:
        if self._gpus:
            readings = [gpu.celsius() for gpu in self._gpus]
            return max((reading for reading in readings if reading is not None), default=None)
        sensors: dict[str, Any] = getattr(psutil, "sensors_temperatures", dict[str, Any])()  # Linux and FreeBSD only
        return max((sensor.current for group in sensors.values() for sensor in group), default=None)

    def _judge(self, trainer: Trainer, kind: str, bad: bool, text: str, value: float, limit: float) -> None:
        if bad == (kind in self._on):
            return
        if not bad:
            self._on.discard(kind)
            log.info("Step %d: %s has recovered.", trainer.global_step, kind)
            return
        self._on.add(kind)
        log.warning("Alert at step %d: %s.", trainer.global_step, text)
        if self._webhook is not None:
            run = Path(trainer.default_root_dir)
            message = {
                "text": f"{run.parent.name}/{run.name}, step {trainer.global_step}: {text}.",
                "kind": kind,
                "value": value if math.isfinite(value) else None,
                "limit": limit if math.isfinite(limit) else None,
                "step": trainer.global_step,
                "run": str(run),
                "host": platform.node(),
            }
            self._webhook.post(message)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._webhook is not None:
            self._webhook.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)
