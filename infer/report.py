"""The demo's report: one markdown page and one plot, from figures the stages wrote."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def write_report(output: Path, target: str, check: dict[str, Any], compare: dict[str, Any], machine: str) -> Path:
    """Writes ``report.md`` and ``report.png`` into the output folder and returns the page's path."""
    records = read_log(output / "train" / "log.jsonl")
    provenance = json.loads((output / "train" / "final" / "provenance.json").read_text(encoding="utf-8"))
    training = provenance["training"]
    modules = training["config"]["modules"]
    plot(output / "report.png", records, compare)
    path = output / "report.md"
    evaluations = [record for record in records if "eval/acceptance_length" in record]
    lines = [
        "# Demo report",
        "",
        f"Target {target}, k = {modules['draft_steps'] or modules['num_modules']}; {machine}.",
        f"Trained {training['step']} steps on {training['data'][0]['records']} answers, "
        f"{training['elapsed_seconds'] / 60:.1f} minutes; replay on {training['data'][1]['records']} held-out answers: "
        f"acceptance length {evaluations[-1]['eval/acceptance_length']:.3f}.",
        "",
        decoding_table(compare),
        "",
        f"Same prompts replayed by the training forward: acceptance length "
        f"{compare['replay']['acceptance_length']:.4f}. Tokens/s at batch 1, float32.",
        "",
        "| check | rounds | cells compared | mismatches | largest relative difference |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(
            f"| {name} | {figures['rounds']} | {figures['cells']} | {figures['mismatches']} "
            f"| {figures['largest']:.1e} |"
            for name, figures in check.items()
        ),
        "",
        "![training and decoding](report.png)",
        "",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def decoding_table(compare: dict[str, Any]) -> str:
    """Returns the markdown table of decoding speeds and acceptance."""
    lines = [
        f"| decoding {compare['prompts']} held-out prompts | tokens/s | against plain | acceptance length | survival |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    plain = compare["rows"][0]["tokens_per_second"]
    for row in compare["rows"]:
        survival = " / ".join(f"{value:.3f}" for value in row.get("survival", []))
        length = f"{row['acceptance_length']:.3f}" if "acceptance_length" in row else ""
        speed = row["tokens_per_second"]
        lines.append(f"| {row['name']} | {speed:.1f} | {speed / plain:.2f}x | {length} | {survival} |")
    return "\n".join(lines)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a training log."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def plot(path: Path, records: list[dict[str, Any]], compare: dict[str, Any]) -> None:
    """Draws acceptance length while training, and survival per module when decoding."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    evaluations = [record for record in records if "eval/acceptance_length" in record]
    left.plot(
        [record["step"] for record in evaluations], [record["eval/acceptance_length"] for record in evaluations], "o-"
    )
    left.set(xlabel="step", ylabel="acceptance length", title="replay on held-out text while training")
    left.grid(alpha=0.3)
    drafting = [row for row in compare["rows"] if row.get("survival")]
    width = 0.8 / max(len(drafting), 1)
    for place, row in enumerate(drafting):
        xs = [index + 1 + (place - (len(drafting) - 1) / 2) * width for index in range(len(row["survival"]))]
        label = f"{row['name']}: {row['acceptance_length']:.3f}"
        right.bar(xs, row["survival"], width, label=label)
    right.set(xlabel="module", ylabel="survival", title="decoding held-out prompts")
    right.set_xticks(range(1, 1 + max((len(row["survival"]) for row in drafting), default=0)))
    right.legend(title="acceptance length")
    right.grid(alpha=0.3, axis="y")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
