"""The task (`task`) is chosen apart from the net (`model`)."""

from support.runs import config

from lathe.runs.build import make_task
from lathe.tasks import ClassificationTask, LanguageModellingTask

CLASSES = "lathe.tasks.ClassificationTask"


def test_a_model_of_text_brings_its_task_and_the_command_line_wins() -> None:
    assert type(make_task(config("model=gpt_nano", "data=synthetic_tokens"))) is LanguageModellingTask
    assert type(make_task(config("model=mlp"))) is ClassificationTask
    words = ["model=gpt_nano", "data=synthetic_tokens", "task=classification"]
    assert config(*words)["task"]["_target_"] == CLASSES
