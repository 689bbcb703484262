"""The task suites of MoH's language models (Jin et al. 2024), with the paper's numbers. Data only.

The paper says "accuracy" or "exact match" and names the harness, not its metric. Metrics chosen here, and why:

- acc_norm wherever a task has it. LLaMA3-8B in table 5 has HellaSwag 81.9 and ARC-C 59.0; public runs of it in
  the harness have acc 62 and 55, acc_norm 82.1 and 57.5. LLM-S in table 4 has LogiQA 26.9 and SciQ 63.0, the
  acc_norm of models of its size (Pythia-160M: 26.4 and 66.0, acc 19.5 and 73.5).
- TruthfulQA is the mean of MC1 and MC2, which harnesses of 2024 printed for the group `truthfulqa`: a public run of
  LLaMA3-8B has 27, 43.9 and for the group 35; the paper prints 35.4.
- GSM8K is gsm8k with 8 shots (strict-match), LAMBADA is lambada_openai, CEVAL its validation split (the test
  answers are not public).

The paper's averages are plain means of a table's columns: all 13 rows of tables 4, 5 and E agree to the digit printed.
"""

from collections.abc import Sequence
from typing import NamedTuple

from moh_vision.models.describe import aligned


class Row(NamedTuple):
    """A column of the paper's table; its value is the mean over its tasks."""

    title: str  # in the paper
    shots: int  # examples before each question; -1: the task's own number
    metric: str  # in the harness, such as "acc,none": behind the comma is the filter
    tasks: tuple[str, ...]  # in the harness


class Suite(NamedTuple):
    """A table of the paper."""

    source: str
    rows: tuple[Row, ...]
    paper: dict[str, tuple[float, ...]]  # name of a model -> percent, in the order of rows

    @property
    def averages(self) -> dict[str, float]:
        """Return name of a model -> its average as in the paper, which rounds halves up."""
        return {
            name: round(sum(values) / len(values) + 1e-9, 1) for name, values in self.paper.items()
        }


SCIQ = Row("SciQ", 0, "acc_norm,none", ("sciq",))
PIQA = Row("PIQA", 0, "acc_norm,none", ("piqa",))
WINOGRANDE = Row("WinoGrande", 0, "acc,none", ("winogrande",))
OPENBOOKQA = Row("OpenbookQA", 0, "acc_norm,none", ("openbookqa",))
LOGIQA = Row("LogiQA", 0, "acc_norm,none", ("logiqa",))
TRUTHFULQA = Row("TruthfulQA", 0, "acc,none", ("truthfulqa_mc1", "truthfulqa_mc2"))
MMLU = Row("MMLU", 5, "acc,none", ("mmlu",))
CEVAL = Row("CEVAL", 5, "acc,none", ("ceval-valid",))
CMMLU = Row("CMMLU", 5, "acc,none", ("cmmlu",))
GSM8K = Row("GSM8K", 8, "exact_match,strict-match", ("gsm8k",))
HELLASWAG = Row("HellaSwag", 10, "acc_norm,none", ("hellaswag",))
BOOLQ = Row("BoolQ", 32, "acc,none", ("boolq",))
LAMBADA = Row("LAMBADA", 0, "acc,none", ("lambada_openai",))
NQ = Row("NQ", 32, "exact_match,remove_whitespace", ("nq_open",))
ARC_E = Row("ARC-E", 0, "acc_norm,none", ("arc_easy",))
ARC_C = Row("ARC-C", 25, "acc_norm,none", ("arc_challenge",))

SUITES: dict[str, Suite] = {
    "moh-llm": Suite(
        source="MoH, table 4",
        rows=(SCIQ, PIQA, WINOGRANDE, OPENBOOKQA, LOGIQA, TRUTHFULQA),
        paper={
            "S 100B": (63.0, 63.1, 51.1, 27.4, 26.9, 31.6),
            "S75 100B": (64.7, 62.0, 50.6, 28.8, 26.4, 35.2),
            "S50 100B": (67.0, 62.2, 51.5, 29.2, 26.7, 35.6),
            "B 100B": (73.1, 69.7, 52.0, 31.8, 28.4, 29.5),
            "B75 100B": (74.7, 69.2, 52.8, 30.0, 28.1, 32.2),
            "B50 100B": (75.2, 67.0, 52.0, 29.0, 26.9, 32.8),
            "B 200B": (73.1, 70.3, 53.3, 32.4, 29.0, 29.5),
            "B75 200B": (76.0, 69.2, 52.7, 30.4, 29.8, 32.6),
            "B50 200B": (75.6, 66.9, 53.5, 29.4, 26.7, 32.7),
        },
    ),
    "moh-llama3": Suite(
        source="MoH, table 5",
        rows=(MMLU, CEVAL, CMMLU, GSM8K, TRUTHFULQA, HELLASWAG, LOGIQA, BOOLQ, LAMBADA, SCIQ, PIQA, WINOGRANDE, NQ, ARC_C),
        paper={
            "LLaMA3-8B": (65.2, 52.3, 50.7, 49.5, 35.4, 81.9, 30.0, 83.9, 75.5, 94.0, 81.0, 72.5, 31.5, 59.0),
            "MoH-LLaMA3": (65.8, 61.5, 64.4, 56.9, 44.0, 80.1, 30.3, 84.0, 76.4, 92.2, 78.8, 72.9, 28.3, 60.1),
        },
    ),
    "moh-llama3-stage1": Suite(
        source="MoH, table E",
        rows=(MMLU, CMMLU, NQ, GSM8K, TRUTHFULQA, HELLASWAG, LOGIQA, BOOLQ, LAMBADA, SCIQ, PIQA, WINOGRANDE, ARC_E, ARC_C),
        paper={
            "stage1": (66.2, 66.0, 28.1, 58.6, 41.9, 79.4, 30.4, 85.1, 75.8, 92.2, 79.1, 73.0, 70.9, 59.6),
            "MoH-LLaMA3": (65.8, 64.4, 28.3, 56.9, 44.0, 80.1, 30.3, 84.0, 76.4, 92.2, 78.8, 72.9, 72.5, 60.1),
        },
    ),
}  # fmt: skip


def average(values: Sequence[float | None]) -> float | None:
    """Return the plain mean, as the paper does; None if a number is missing."""
    if not values or None in values:
        return None
    return sum(values) / len(values)


def suite_table(name: str, values: Sequence[float | None] | None = None) -> str:
    """Format the scores of a suite beside the paper's: a line for each row, then the average.

    `values` are percent in the order of the suite's rows; None: no model was scored.
    """
    suite = SUITES[name]
    header = ["task", "shots", "metric"]
    if values:
        header.append("here")
    lines = [[*header, *suite.paper]]
    for i, row in enumerate(suite.rows):
        metric = row.metric.removesuffix(",none")
        if len(row.tasks) > 1:
            metric += " of mc1 and mc2"
        line = [row.title, str(row.shots), metric]
        if values:
            line.append(_number(values[i], 2))
        line += [_number(numbers[i], 1) for numbers in suite.paper.values()]
        lines.append(line)
    line = ["average", "", ""]
    if values:
        line.append(_number(average(values), 2))
    line += [_number(mean, 1) for mean in suite.averages.values()]
    lines.append(line)
    return "\n".join([f"{name} ({suite.source})", *aligned(lines)])


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}"
