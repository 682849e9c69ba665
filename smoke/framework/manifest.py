"""``lessons/manifest.toml`` as frozen values.

Owns: the course's structure and every check on it. Must not know: engine code, checks, files of students.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

SUITE = Path(__file__).resolve().parent.parent
ROOT = SUITE.parent
# Where the texts lie: next to the package in a checkout, inside of it in a wheel.
COURSE = ROOT if (ROOT / "lessons" / "manifest.toml").is_file() else SUITE
MANIFEST = COURSE / "lessons" / "manifest.toml"
ENGINE = ROOT / "mini_engine"

LESSON_KEYS = {"id", "slug", "title", "goal", "files", "needed_earlier", "starts_processes", "task", "option"}
TASK_KEYS = {"id", "title", "points", "minutes", "functions", "depends"}
FIRST_PAGE, FURTHER_PAGE = 35, 15  # minutes: with its questions or examples; a task's minutes include its page
OPTION_KEYS = {"name", "off", "on", "effect"}


@dataclass(frozen=True)
class FunctionName:
    """A function of the engine; ``attention.pool:KVPool.write`` lies in ``mini_engine.attention.pool``."""

    module: str
    qualname: str

    @classmethod
    def parse(cls, text: str) -> "FunctionName":
        """Read ``module:qualified.name``. Raises ``ValueError`` for anything else."""
        module, separator, qualname = text.partition(":")
        if not separator or not all(part.isidentifier() for part in (module + "." + qualname).split(".")):
            raise ValueError(f"function {text!r} is not of the form module:qualified.name")
        return cls(module, qualname)

    @property
    def file(self) -> str:
        """The module's file, relative to ``mini_engine``."""
        return self.module.replace(".", "/") + ".py"

    def __str__(self) -> str:
        """Return the form that ``parse`` reads."""
        return f"{self.module}:{self.qualname}"


@dataclass(frozen=True)
class Task:
    """One thing to write: the functions that its starter empties, what it is worth and which tasks it needs.

    ``minutes``: for a reader who knows Python and torch tensors. ``is_optional``: no later lesson needs it.
    """

    id: str
    title: str
    points: int
    minutes: int
    functions: tuple[FunctionName, ...]
    depends: tuple[str, ...]
    is_optional: bool = False

    @property
    def lesson_id(self) -> str:
        """``L2`` of ``L2.B``."""
        return self.id.split(".")[0]

    @property
    def page_name(self) -> str:
        """``B_the_kv_pool.md`` of L2.B, The KV pool."""
        return f"{self.id.split('.')[1]}_{re.sub('[^a-z0-9]+', '_', self.title.lower()).strip('_')}.md"


@dataclass(frozen=True)
class Option:
    """A switch that a lesson introduces: the last part of ``name`` is a parameter or dataclass field of the rest.

    ``off`` is its default, which ``sync`` compares with the code; ``on`` shows another value; ``effect`` says what that
    one does.
    """

    name: FunctionName
    off: str
    on: str
    effect: str


@dataclass(frozen=True)
class Lesson:
    """A lesson. One that is announced and not written yet has no files and no tasks.

    ``needed_earlier``: those of its files that an earlier lesson's code calls, and the first such lesson.
    ``starts_processes``: its checks do, so grading does not note it.
    """

    id: str
    slug: str
    title: str
    goal: str
    files: tuple[str, ...]
    tasks: tuple[Task, ...]
    options: tuple[Option, ...] = ()
    needed_earlier: tuple[tuple[str, str], ...] = ()
    starts_processes: bool = False

    @property
    def number(self) -> int:
        """2 of ``L2``."""
        return int(self.id[1:])

    @property
    def core(self) -> tuple[Task, ...]:
        """The tasks that are not optional."""
        return tuple(task for task in self.tasks if not task.is_optional)

    @property
    def optional(self) -> tuple[Task, ...]:
        """The tasks that no later lesson needs."""
        return tuple(task for task in self.tasks if task.is_optional)

    def minutes(self, tasks: Iterable[Task]) -> int:
        """Return the minutes that these of its tasks take together with what is read before them."""
        return FIRST_PAGE + FURTHER_PAGE * len(self.further_pages()) + sum(task.minutes for task in tasks)

    def hours(self, tasks: Iterable[Task]) -> int:
        """Return ``minutes`` in hours, rounded."""
        return round(self.minutes(tasks) / 60)

    @property
    def folder(self) -> str:
        """The name of its folder in ``smoke/checks`` and ``smoke/bank``."""
        return self.id.lower()

    @property
    def text_folder(self) -> str:
        """The folder of the lesson's pages, relative to ``COURSE``."""
        return f"lessons/{self.slug}"

    @property
    def text_file(self) -> str:
        """The lesson's first page, relative to ``COURSE``."""
        return f"{self.text_folder}/README.md"

    def further_pages(self, course: Path = COURSE) -> list[str]:
        """Return the names of the pages that are read after the first one and before the tasks."""
        others = {"README.md", "reference.md", *(task.page_name for task in self.tasks)}
        return sorted({path.name for path in (course / self.text_folder).glob("*.md")} - others)

    def pages(self, course: Path = COURSE) -> list[Path]:
        """Return the lesson's pages in the order of reading: the story, further pages, the tasks, the reference."""
        tasks = [task.page_name for task in self.tasks]
        names = ("README.md", *self.further_pages(course), *tasks, "reference.md")
        return [course / self.text_folder / name for name in names]

    def page(self, task: Task | None = None) -> str:
        """Return the page of a task, or the first one, as a reader finds it: relative in a checkout, else absolute."""
        file = self.text_file if task is None else f"{self.text_folder}/{task.page_name}"
        return file if COURSE == ROOT else str(COURSE / file)


@dataclass(frozen=True)
class Manifest:
    """All lessons, in order."""

    lessons: tuple[Lesson, ...]

    @property
    def written(self) -> tuple[Lesson, ...]:
        """The lessons that have tasks."""
        return tuple(lesson for lesson in self.lessons if lesson.tasks)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Every task of every lesson, in order."""
        return tuple(self.task_of.values())

    @cached_property
    def task_of(self) -> dict[str, Task]:
        """Every task by its id."""
        return {task.id: task for lesson in self.lessons for task in lesson.tasks}

    @cached_property
    def needed_by(self) -> dict[str, frozenset[str]]:
        """Of every task the ids of those that it builds on, all of which stand earlier."""
        found: dict[str, frozenset[str]] = {}
        for lesson in self.lessons:
            earlier = frozenset(found)
            for task in lesson.tasks:
                found[task.id] = earlier.union(task.depends, *(found[other] for other in task.depends))
        return found

    def lesson(self, lesson_id: str) -> Lesson:
        """Return the written lesson ``lesson_id``. Raises ``ValueError`` naming the ones that can be chosen."""
        for lesson in self.written:
            if lesson.id == lesson_id.upper():
                return lesson
        choices = ", ".join(lesson.id for lesson in self.written)
        raise ValueError(f"there is no lesson {lesson_id!r} to work on; choose one of {choices}")

    def task(self, task_id: str) -> Task:
        """Return one task. Raises ``ValueError`` for an unknown id, naming those of its lesson."""
        if (task := self.task_of.get(task_id.upper())) is not None:
            return task
        lesson = self.lesson(task_id.partition(".")[0])
        names = ", ".join(task.id for task in lesson.tasks)
        raise ValueError(f"there is no task {task_id!r}; {lesson.id} has {names}")

    def upto(self, lesson_id: str) -> tuple[Lesson, ...]:
        """Return the written lessons up to and including ``lesson_id``."""
        last = self.lesson(lesson_id).number
        return tuple(lesson for lesson in self.written if lesson.number <= last)

    def needs(self, task_id: str) -> frozenset[str]:
        """Return every task that ``task_id`` builds on: its dependencies, theirs, and all of the earlier lessons."""
        return self.needed_by[self.task(task_id).id]


@cache
def load_manifest(file: Path = MANIFEST) -> Manifest:
    """Read and check the manifest. Raises ``ValueError`` naming the entry that is wrong."""
    with file.open("rb") as stream:
        return parse_manifest(tomllib.load(stream))


def parse_manifest(raw: Mapping[str, Any]) -> Manifest:
    """Turn parsed TOML into a ``Manifest``. Raises ``ValueError`` naming the entry that is wrong."""
    refuse_unknown("the manifest", raw, {"lesson"})
    manifest = Manifest(tuple(parse_lesson(entry) for entry in raw.get("lesson", [])))
    seen: set[str] = set()
    for entry_id in all_ids(manifest):
        if entry_id in seen:
            raise ValueError(f"{entry_id} is defined twice in the manifest")
        seen.add(entry_id)
    check_dependencies(manifest)
    return manifest


def all_ids(manifest: Manifest) -> Iterator[str]:
    """Yield every lesson id, task id and function name; none may occur twice."""
    for lesson in manifest.lessons:
        yield lesson.id
        for task in lesson.tasks:
            yield task.id
            yield from map(str, task.functions)


def parse_lesson(raw: Mapping[str, Any]) -> Lesson:
    """Read one ``[[lesson]]``."""
    name = f"lesson {raw.get('id', '(without id)')}"
    refuse_unknown(name, raw, LESSON_KEYS)
    require(name, raw, {"id", "slug", "title", "goal"})
    lesson_id = raw["id"]
    if not (lesson_id.startswith("L") and lesson_id[1:].isdigit()):
        raise ValueError(f"lesson id {lesson_id!r} is not of the form L1")
    if raw.get("task"):
        require(name, raw, {"files"})
    lesson = Lesson(
        id=lesson_id,
        slug=raw["slug"],
        title=raw["title"],
        goal=raw["goal"],
        files=tuple(raw.get("files", ())),
        tasks=tuple(parse_task(entry) for entry in raw.get("task", [])),
        options=tuple(parse_option(entry) for entry in raw.get("option", [])),
        needed_earlier=tuple(raw.get("needed_earlier", {}).items()),
        starts_processes=raw.get("starts_processes", False),
    )
    strange = sorted({file for file, _ in lesson.needed_earlier} - set(lesson.files))
    if strange:
        raise ValueError(f"{name} says that {strange[0]} is needed earlier, and it is no file of it")
    for task in lesson.tasks:
        if task.lesson_id != lesson.id:
            raise ValueError(f"task {task.id} stands in lesson {lesson.id}")
        for function in task.functions:
            if function.file not in lesson.files:
                raise ValueError(f"task {task.id} empties {function}, and {function.file} is no file of {lesson.id}")
    return lesson


def parse_option(raw: Mapping[str, Any]) -> Option:
    """Read one ``[[lesson.option]]``."""
    name = f"option {raw.get('name', '(without name)')}"
    refuse_unknown(name, raw, OPTION_KEYS)
    require(name, raw, OPTION_KEYS)
    return Option(FunctionName.parse(raw["name"]), raw["off"], raw["on"], raw["effect"])


def parse_task(raw: Mapping[str, Any]) -> Task:
    """Read one ``[[lesson.task]]``."""
    name = f"task {raw.get('id', '(without id)')}"
    refuse_unknown(name, raw, TASK_KEYS | {"optional"})
    require(name, raw, TASK_KEYS)
    for key in ("points", "minutes"):
        if not isinstance(raw[key], int) or raw[key] < 1:
            raise ValueError(f"{name} has {key} {raw[key]!r}; give a whole number of at least 1")
    if not raw["functions"]:
        raise ValueError(f"{name} empties no function")
    return Task(
        id=raw["id"],
        title=raw["title"],
        points=raw["points"],
        minutes=raw["minutes"],
        functions=tuple(FunctionName.parse(text) for text in raw["functions"]),
        depends=tuple(raw["depends"]),
        is_optional=raw.get("optional", False),
    )


def check_dependencies(manifest: Manifest) -> None:
    """Raise ``ValueError`` unless every dependency is a task that stands earlier: so there are no cycles either."""
    seen: set[str] = set()
    for task in manifest.tasks:
        for needed in task.depends:
            if needed not in seen:
                raise ValueError(f"task {task.id} depends on {needed}, which is no earlier task")
        seen.add(task.id)


def refuse_unknown(name: str, raw: Mapping[str, Any], known: set[str]) -> None:
    """Raise ``ValueError`` for a key that nothing reads."""
    unknown = sorted(set(raw) - known)
    if unknown:
        raise ValueError(f"{name} has an unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")


def require(name: str, raw: Mapping[str, Any], keys: set[str]) -> None:
    """Raise ``ValueError`` for a key that is missing."""
    missing = sorted(keys - set(raw))
    if missing:
        raise ValueError(f"{name} lacks the key {missing[0]!r}")
