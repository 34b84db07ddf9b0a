"""Load tasks of lm-evaluation-harness by name, and limit the code that runs for them.

Its own tasks are pinned code, and may run. A task in the user's YAML runs no code: `!function` is refused, and
templates run in a sandbox. No metric is fetched from the hub, because that would be code too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import evaluate
from jinja2 import StrictUndefined, Template
from jinja2.sandbox import SandboxedEnvironment
from lm_eval import utils
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager, _yaml_loader
from lm_eval.tasks._index import TaskIndex
from lm_eval.tasks._yaml_loader import load_yaml

from quantmill.common import limited
from quantmill.common.program import UserError, first_line, suggestion
from quantmill.tasks import own_tasks
from quantmill.tasks.own_tasks import OWN

refused: list[str] = []  # metrics
FEWSHOT_SEED = 1234  # lm-evaluation-harness' own default
RENDERING = {"megabytes": 512, "seconds": 20}  # limits of one text of a task
MAX_TEXT = 2**22  # characters of it
SCORING = {"megabytes": 2048, "seconds": 60}  # limits of the metrics of an answer, and of the filters of a hundred
KINDS = ("multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until")


@dataclass(frozen=True)
class Loaded:
    """A task, or a group with its tasks, by its name. `files`: the YAML files that define it; `local`: it is not one of
    lm-evaluation-harness."""

    name: str
    item: Task | Group
    files: list[Path]
    local: bool

    @property
    def tasks(self) -> dict[str, Task]:
        """Tasks that have documents, by name."""
        found = self.item.get_all_tasks() if isinstance(self.item, Group) else [self.item]
        return {task.task_name: task for task in found}


@dataclass(frozen=True)
class LimitedTemplate:
    """A template that renders within limits. Use it in a child process (`limited.supervise`)."""

    name: str  # in errors
    template: Template

    def render(self, **words: Any) -> str:
        """Render the template. Raises `UserError` if it exceeds a limit."""
        with limited.step(self.name, **RENDERING):
            text = self.template.render(**words)
        if len(text) > MAX_TEXT:
            raise UserError(f"{self.name}: makes {len(text):,} characters, and {MAX_TEXT:,} are the most")
        return text


class LimitedEnvironment:
    """The part of jinja2's environment that lm-evaluation-harness uses, in a sandbox and with limits."""

    def __init__(self, filters: Mapping[str, Any]) -> None:
        self.sandbox = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        self.sandbox.filters |= filters

    def from_string(self, source: str) -> LimitedTemplate:
        """Compile a template, which computes its constants. Raises `UserError` if that exceeds a limit."""
        name = f"tasks: the template {' '.join(source[:80].split())!r:.60}"
        with limited.step(name, **RENDERING):
            return LimitedTemplate(name, self.sandbox.from_string(source))


def restrain() -> None:
    """Refuse code that comes with data or with the user's tasks, and limit templates."""
    utils.env = LimitedEnvironment(utils.env.filters)
    import_function = _yaml_loader._import_func_in_yml

    def refuse_strangers(name: str, folder: Path) -> Any:
        if not folder.resolve().is_relative_to(OWN):
            raise UserError(
                f"{folder}: a task there wants to run Python (!function {name}); Quantmill runs no code of a task's "
                "own, so say it with a template"
            )
        return import_function(name, folder)

    def refuse_metric(name: str, *_: Any, **__: Any) -> NoReturn:
        refused.append(name)
        raise UserError(f"the metric {name!r} is a program on the hub")

    _yaml_loader._import_func_in_yml = refuse_strangers
    evaluate.load = refuse_metric


def load(name: str, include: Path | None, files: Sequence[Path] | None = None) -> Loaded:
    """Load a task or group by its name, from the user's folder or from lm-evaluation-harness. `files`: the YAML files
    that define it, if they are known. Raises `UserError` if it does not exist or cannot be used."""
    if include:
        own_tasks.check(include)
    local = TaskIndex.build([include]) if include else {}
    manager = TaskManager(include_path=include, include_defaults=files is None and name not in local)
    if files is not None:  # reading all of lm-evaluation-harness' own takes half a minute
        manager._index = {}
        for file in files:
            TaskIndex.process_cfg(load_yaml(file, resolve_func=False), file, manager._index)
    entry = manager.task_index.get(name)
    if entry is None:
        where = f"lm-evaluation-harness{f' and {include}' if include else ''}"
        raise UserError(f"tasks: {where} has no task {name!r}{suggestion(name, manager.all_tasks)}")
    try:
        item = manager._load_spec(name)
    except UserError:
        raise
    except Exception as error:  # of a task's own code, or of lm-evaluation-harness
        if refused:  # the harness hides this error
            raise UserError(
                f"tasks: {name}: its metric {refused[0]!r} is a program on the hub, which is not run"
            ) from None
        raise UserError(f"tasks: {name}: cannot be loaded ({type(error).__name__}: {first_line(error)})") from None
    if isinstance(item, list) or (isinstance(item, Group) and not item.aggregate_metric_list):
        parts = sorted(each.task_name for each in (item if isinstance(item, list) else item.get_all_tasks()))
        raise UserError(f"tasks: {name} has no figure for all its tasks; name those you want: {', '.join(parts)}")
    groups = [item, *item.get_all_groups()] if isinstance(item, Group) else []
    tasks = item.get_all_tasks() if isinstance(item, Group) else [item]
    used = [group.name for group in groups] + [task.task_name for task in tasks]
    paths = [manager.task_index[each].yaml_path for each in used if each in manager.task_index]
    found = Loaded(name, item, list(dict.fromkeys(filter(None, paths))), name in local)
    for each, task in found.tasks.items():
        if task.OUTPUT_TYPE not in KINDS or getattr(task, "MULTIMODAL", False) or getattr(task, "UNSAFE_CODE", False):
            raise UserError(f"tasks: {each} wants pictures, sound or code to be run; name another task")
        words = task.get_config("generation_kwargs") or {}
        if words.get("do_sample") or (words.get("temperature") or 0) > 0 or (words.get("num_beams") or 1) > 1:
            raise UserError(f"tasks: {each} wants samples or beams, and engines write greedily; name another task")
    return found


def prepare(task: Task, num_fewshot: int | None) -> None:
    """Set the number of examples in a prompt and their seed, as lm-evaluation-harness does when it starts. Limit
    filters and metrics, which may be the user's regular expressions."""
    if num_fewshot is not None and task.get_config("num_fewshot") != 0:
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    name, process, filters = f"tasks: {task.task_name}", task.process_results, task.apply_filters

    def process_limited(*arguments: Any, **words: Any) -> Any:
        with limited.step(f"{name}: its metrics", **SCORING):
            return process(*arguments, **words)

    def filters_limited() -> Any:
        seconds = SCORING["seconds"] * (1 + len(task.instances) // 100)
        with limited.step(f"{name}: its filters", megabytes=SCORING["megabytes"], seconds=seconds):
            return filters()

    task.process_results, task.apply_filters = process_limited, filters_limited


def name_files(files: Sequence[Path], include: Path | None) -> list[str]:
    """Return portable names of YAML files: `own/` is lm-evaluation-harness' folder, the rest relative to `include`."""
    found = []
    for file in files:
        own = file.resolve().is_relative_to(OWN)
        found.append(f"own/{file.resolve().relative_to(OWN)}" if own else str(file.relative_to(include or "")))
    return found


def place(names: Sequence[str], include: str | None) -> list[Path]:
    """Return the paths of names by `name_files`."""
    return [OWN / name.removeprefix("own/") if name.startswith("own/") else Path(include or "", name) for name in names]
