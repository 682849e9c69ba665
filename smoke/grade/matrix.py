"""Students against checks: one picture, and one page of Markdown with the commonest failures.

Owns: symbols, colours, layout. Must not know: how points are counted.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.patches import Rectangle

from mini_engine.viz.figure import Figure, canvas, plural, style
from smoke.bank.bank import fitting_pitfalls
from smoke.framework.check import Status, all_checks
from smoke.grade.documents import quoted
from smoke.grade.scoring import StudentScore

# Symbol, background, colour of the symbol. Light and dark alternate, so the picture also reads without colours.
LOOKS: dict[Status, tuple[str, str, str]] = {
    "pass": ("✓", "#d7e8f4", "#1b4f72"),
    "fail": ("×", "#b4431f", "#ffffff"),
    "blocked": ("○", "#f3e3b3", "#5c4400"),
    "timeout": ("T", "#5b2a86", "#ffffff"),
    "crashed": ("!", "#222222", "#ffffff"),
    "not-implemented": ("·", "#ffffff", "#5a5a5a"),
    "skipped": ("–", "#d9d9d9", "#333333"),
}
CELL = 0.21  # inches
COMMONEST = 12


@style()
def picture(students: Sequence[StudentScore], title: str) -> Figure:
    """Draw one cell per student and check, in isolated mode, and each student's points at the right."""
    checks = list(all_checks())
    longest = max(len(student.submission.name) for student in students)
    width, height = len(checks) * CELL + 0.085 * longest + 2.2, len(students) * CELL + 2.6
    figure = canvas(height, width)
    axes = figure.add_subplot()
    for row, student in enumerate(students):
        results = {r.check_id: r.status for score in student.of_mode("isolated") for r in score.results}
        for column, check_id in enumerate(checks):
            symbol, back, front = LOOKS[results[check_id]]
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor=back, edgecolor="white", linewidth=1))
            axes.text(column + 0.5, row + 0.52, symbol, color=front, ha="center", va="center", fontsize=9)
        earned, points = student.total("isolated")
        own = student.total("cumulative")[0]
        withheld = ", withheld" if any(score.withheld for score in student.scores) else ""
        axes.text(
            len(checks) + 0.4, row + 0.5, f"{earned:>3} / {own:>3} of {points}{withheld}", va="center", fontsize=8
        )
    axes.set_xlim(0, len(checks))
    axes.set_ylim(len(students), 0)
    axes.set_xticks([i + 0.5 for i in range(len(checks))], checks, rotation=90, fontsize=8)
    axes.set_yticks([i + 0.5 for i in range(len(students))], [s.submission.name for s in students], fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    lessons = [check_id.partition(".")[0] for check_id in checks]
    for column in range(1, len(checks)):
        if lessons[column] != lessons[column - 1]:
            axes.axvline(column, color="#333333", linewidth=1.2)
    axes.text(len(checks) + 0.4, -0.4, "isolated / cumulative", fontsize=8, va="bottom")
    axes.set_title(title, fontsize=11, pad=10)
    legend = "    ".join(f"{symbol} {name}" for name, (symbol, _, _) in LOOKS.items())
    axes.set_xlabel(f"each lesson's files over the reference:   {legend}", fontsize=9, loc="left", labelpad=10)
    return Figure(figure, summary(students))


def summary(students: Sequence[StudentScore]) -> str:
    """Say in words what the picture shows."""
    full = sum(earned == points for earned, points in (student.total("isolated") for student in students))
    counts = failures(students)
    worst = f" The check most often not passed is {counts[0][0]}, by {len(counts[0][1])}." if counts else ""
    return f"{plural(len(students), 'student')} against {len(all_checks())} checks; {full} with all points.{worst}"


def failures(students: Sequence[StudentScore]) -> list[tuple[str, list[str]]]:
    """Return the checks that were run and not passed with the students' names, the commonest first."""
    names: dict[str, list[str]] = defaultdict(list)
    for student in students:
        for score in student.of_mode("isolated"):
            for result in score.results:
                if result.status in ("fail", "timeout", "crashed"):
                    names[result.check_id].append(student.submission.name)
    return sorted(names.items(), key=lambda item: -len(item[1]))


def page(students: Sequence[StudentScore], conditions: Sequence[str]) -> str:
    """Return ``matrix.md``: the table by task, the commonest failures, and what was noticed."""
    tasks = [task.task.id for score in students[0].of_mode("isolated") for task in score.tasks]
    lines = ["# Students and tasks", "", "![students against checks](matrix.png)", "", summary(students), ""]
    lines += ["Each lesson's files over the reference; the last two columns are points, isolated and cumulative.", ""]
    lines += [f"| student | {' | '.join(tasks)} | isolated | cumulative |", "|---" * (len(tasks) + 1) + "|---:|---:|"]
    for student in students:
        marks = [LOOKS[task.status][0] for score in student.of_mode("isolated") for task in score.tasks]
        totals = f"{student.total('isolated')[0]} | {student.total('cumulative')[0]}"
        lines.append(f"| [{student.submission.name}](students/{student.submission.name}/report.md) "
                     f"| {' | '.join(marks)} | {totals} |")  # fmt: skip
    lines += ["", "Signs: " + ", ".join(f"{symbol} {name}" for name, (symbol, _, _) in LOOKS.items()) + ".", ""]
    lines += ["## The commonest failures", "", "| check | students | proves | pitfalls that look like it |"]
    lines.append("|---|---:|---|---|")
    for check_id, names in failures(students)[:COMMONEST]:
        likely = ", ".join(f"{pitfall.id} {pitfall.title}" for pitfall in fitting_pitfalls(check_id)[:3])
        lines.append(f"| {check_id} | {len(names)} | {all_checks()[check_id].proves} | {likely} |".replace("\n", " "))
    lines += ["", "## Noticed", "", *noticed(students), "", "## How it was graded", ""]
    return "\n".join([*lines, *(f"- {condition}" for condition in conditions)]) + "\n"


def noticed(students: Sequence[StudentScore]) -> list[str]:
    """Return one line per student and remark; the same remark about several lessons is one line."""
    lines = []
    for student in students:
        lessons: dict[str, list[str]] = defaultdict(list)
        for score in student.scores:
            for note in (*score.notes, *score.remarks):
                if score.lesson.id not in lessons[note]:
                    lessons[note].append(score.lesson.id)
        name = student.submission.name
        lines += [f"- {name}: {quoted(fault)}" for fault in student.submission.faults]
        told = [f"{quoted(note)} ({', '.join(where)})" for note, where in lessons.items()]
        lines += [f"- {name}: {'; '.join(told)}"] if told else []
    return lines or ["Nothing."]


def write_matrix(out: Path, students: Sequence[StudentScore], conditions: Sequence[str], seed: int) -> None:
    """Write ``matrix.png`` and ``matrix.md``."""
    (out / "matrix.md").write_text(page(students, conditions), encoding="utf-8")
    points = Counter(student.total("isolated")[0] for student in students)
    title = f"{plural(len(students), 'submission')}, seed {seed}, best {max(points)} points"
    picture(students, title).save(out / "matrix.png", dpi=110)
