"""Links such as logs/latest in a command: a run remembers where they led when it was started."""

from support.typed import Command

from lathe.runs.rundir import RunDir


def newer(command: Command, *known: RunDir) -> list[RunDir]:
    """The runs that are not `known`; those of one second have no order."""
    return [run for run in command.runs if run.path not in [other.path for other in known]]


def test_a_link_to_the_newest_run_keeps_its_meaning_once_the_run_has_begun(command: Command, broken: RunDir) -> None:
    latest = command.log_dir / "latest"
    latest.symlink_to(broken.path)
    typed = (
        "model=mlp",
        f"ckpt_path={latest}",
        "compression=distill",
        f"compression.distill.teacher=[{latest},nowhere]",
    )
    command(*typed)
    (run,) = newer(command, broken)
    assert run.config["ckpt_path"] == str(broken.path)
    assert run.config["compression"]["distill"]["teacher"] == [str(broken.path), "nowhere"]
    (run.path / "result.json").unlink()
    command(*typed, "resume=auto")  # the same command, and the link where it was
    typed = ("model=mlp", f"ckpt_path={latest}")
    command(*typed)
    (other,) = newer(command, broken, run)
    (other.path / "result.json").unlink()
    latest.unlink()
    latest.symlink_to(other.path)  # as a run does once it has begun
    count = len(command.runs)
    command(*typed, "resume=auto")
    assert (len(command.runs), other.complete, run.complete) == (count, True, True)
    assert other.config["ckpt_path"] == str(broken.path)
