"""Make the pictures of README.md and docs/tutorial.md from real commands.

    python benchmarks/pictures.py                   # all of them, about ten minutes on two idle cores
    python benchmarks/pictures.py session sweep     # some: session, sweep, report, samples, tutorial

Needs tmux and Chromium (Debian: apt-get install tmux chromium) and playwright, which requirements-dev.txt installs.
"""

import argparse
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, ImageOps
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TIMEOUT = 900  # seconds for one command
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
PROMPT = r"(?m)^\$\Z"


def session(folder: Path) -> None:
    """Stop a run with Ctrl-C, resume it, and train it again without a stop: docs/session.svg."""
    with terminal(folder, height=200) as screen:
        screen.type("python train.py name=demo trainer.max_epochs=8 callbacks.model_summary=null")
        screen.wait_for(r"(?i)epoch 4/")
        screen.press("C-c")
        screen.wait_for(PROMPT)
        screen.run("python train.py name=demo trainer.max_epochs=8 callbacks.model_summary=null resume=auto")
        screen.run("python scripts/reproduce.py run=logs/demo | tail -n 8")
        screen.save(DOCS / "session.svg")


def sweep(folder: Path) -> None:
    """Record the table of a running sweep: docs/sweep.svg."""
    with terminal(folder, height=24) as screen:
        screen.type("python train.py -m model=mlp model.net.width=16,64,256 optimizer.lr=0.03,0.1 sweep.jobs=2")
        screen.wait_for(r"(?s)(complete.*){4}")
        screen.save(DOCS / "sweep.svg")
        screen.press("C-c")
        screen.wait_for(PROMPT)


def report(folder: Path) -> None:
    """Record the report page of 24 runs: docs/report_page.png."""
    overrides = "name=mlp_on_digits model=mlp model.net.width=16,64,256 optimizer.lr=0.01,0.1 seed=1,2,3,4"
    run(f"python train.py -m {overrides} trainer.max_epochs=8", folder)
    run("python scripts/report.py runs=logs/mlp_on_digits", folder)
    photograph(folder / "logs/mlp_on_digits/report/report.html", DOCS / "report_page.png", 1280, 1420)


def samples(folder: Path) -> None:
    """Record the predictions of a net after three epochs: docs/samples_page.png."""
    run("python train.py name=samples model=mlp trainer.max_epochs=3 'callbacks=[default,samples]'", folder)
    photograph(newest(folder, "samples") / "samples/val.html", DOCS / "samples_page.png", 1280, 1420)


def tutorial(folder: Path) -> None:
    """Record the pictures of docs/tutorial.md: shapes.jpg, shapes_samples.png and receipt.svg."""
    text = (DOCS / "tutorial.md").read_text()
    for path, block in re.findall(r"`([\w/]+\.(?:py|yaml))`[^`]*:\n\n```\w+\n(.*?)```", text, flags=re.DOTALL):
        (folder / path).write_text(block)
    run("python shapes.py", folder)
    grid = Image.new("RGB", (12 * 68 + 4, 72), "white")
    for column, (name, number) in enumerate((n, i) for n in ("circle", "square", "triangle") for i in range(4)):
        picture = Image.open(folder / "shapes" / name / f"{number:03}.png")
        grid.paste(ImageOps.fit(picture, (64, 64)), (4 + 68 * column, 4))
    grid.save(DOCS / "shapes.jpg", quality=80)
    run("python train.py experiment=shapes", folder)
    photograph(newest(folder, "shapes") / "samples/val.html", DOCS / "shapes_samples.png", 1280, 1000)
    run("python train.py experiment=shapes_small", folder)
    shutil.copy(newest(folder, "shapes_small") / "receipt.svg", DOCS / "receipt.svg")


def run(command: str, folder: Path) -> None:
    subprocess.run(shlex.split(command), cwd=folder, env=ENVIRONMENT, check=True, timeout=TIMEOUT)  # noqa: S603


def newest(folder: Path, name: str) -> Path:
    return max(path.parent for path in (folder / "logs" / name).glob("*/config.yaml"))


def photograph(page: Path, target: Path, width: int, height: int) -> None:
    """Take a screenshot of the top of a page."""
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        tab.goto(page.resolve().as_uri())
        tab.wait_for_timeout(3000)  # until the plots are drawn
        tab.screenshot(path=target)
        browser.close()
    Image.open(target).quantize(256).save(target, optimize=True)


class Terminal:
    """A bash session in tmux, 100 columns wide."""

    def __init__(self, socket: str) -> None:
        self.socket = socket

    def tmux(self, *words: str) -> str:
        command = ["tmux", "-L", self.socket, *words]
        return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout  # noqa: S603

    def press(self, key: str) -> None:
        self.tmux("send-keys", key)

    def type(self, line: str) -> None:
        self.tmux("send-keys", "-l", line)
        self.press("Enter")

    def run(self, line: str) -> None:
        self.type(line)
        time.sleep(2)  # the prompt before the command could match
        self.wait_for(PROMPT)

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not re.search(pattern, self.tmux("capture-pane", "-p").rstrip()):
            if time.monotonic() > deadline:
                raise TimeoutError(pattern)
            time.sleep(0.1)

    def save(self, path: Path) -> None:
        """Write the screen as SVG, without the empty prompt at its end."""
        lines = self.tmux("capture-pane", "-p", "-e").rstrip("\n").split("\n")
        if lines[-1].strip() == "$":
            lines.pop()
        console = Console(width=100, record=True, file=io.StringIO(), force_terminal=True)
        for line in lines:
            console.print(Text.from_ansi(line), no_wrap=True, overflow="crop")
        svg = console.export_svg(title="", unique_id=path.stem)
        path.write_text(re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL))


@contextmanager
def terminal(folder: Path, height: int) -> Iterator[Terminal]:
    screen = Terminal(f"pictures-{os.getpid()}")
    screen.tmux("new-session", "-d", "-x", "100", "-y", str(height), "-c", str(folder), "bash --norc --noprofile")
    try:
        screen.type("PS1='$ '; clear")
        time.sleep(1)
        yield screen
    finally:
        screen.tmux("kill-server")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    makers = {maker.__name__: maker for maker in (session, sweep, report, samples, tutorial)}
    parser.add_argument("names", nargs="*", choices=[*makers, []], default=[])
    for name in parser.parse_args().names or makers:
        with tempfile.TemporaryDirectory(prefix="lathe_") as folder:
            for part in ("configs", "scripts", "train.py"):
                copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
                copy(ROOT / part, Path(folder) / part)
            makers[name](Path(folder))


if __name__ == "__main__":
    main()
