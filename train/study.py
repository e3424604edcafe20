"""``python -m train.study --config FILE [key=value ...]``: several runs on equal data, one table and one plot.

The file gives a base config, settings for all runs, and for each run its own. Runs on the same text share the
target's hidden states on disk, which are written first and count for no run's minutes; each is an ordinary training
run in its own process and folder, so a study that was stopped goes on where it was. Ends with one JSON line.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from mtp import UserError
from mtp.checkpoint import read_provenance
from mtp.commands import run_command
from train.config import Config, find_file, load_config
from train.parse import parse_yaml
from train.plots import new_figure, save_figure
from train.provenance import toolkit
from train.tracking import MINUTES

COLOURS = 10  # of matplotlib, before they repeat


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs or finishes a study; returns 0, or the status of what failed."""
    parser = argparse.ArgumentParser(prog="python -m train.study", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True, help="YAML file with base, settings and runs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of every run, output= of the study")
    options = parser.parse_args(arguments)
    return run_command(lambda: _study(options.config, options.overrides))


def read_study(name: str) -> tuple[str, list[str], dict[str, list[str]]]:
    """Returns the base config's name, the settings of all runs, and each run's own, as ``key=value``.

    Raises:
        UserError: the file is missing or not of this form.
    """
    path = find_file(name, "study")
    try:
        study = parse_yaml(path.read_text(encoding="utf-8-sig"))
        base, runs = str(study["base"]), study["runs"]
        common = _flags(study.get("settings") or {})
        return base, common, {str(run): _flags(settings or {}) for run, settings in runs.items()}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: expected base: CONFIG, settings: {{key: value}} and runs: {{name: {{key: value}}}} "
            f"({type(error).__name__}: {error})"
        ) from None


def _flags(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def _study(name: str, overrides: list[str]) -> int:
    base, common, runs = read_study(name)
    common = [*common, *overrides]
    output = Path(load_config(base, common).output)
    for command in commands(base, common, runs, output):
        print("$ python", *command[1:], flush=True)
        if status := finished(command):
            return status
    figures = [run_figures(output / run, run) for run in runs]
    page = output / "study.md"
    page.write_text(table(figures), encoding="utf-8")
    plot(output / "study.png", {run: evaluations(output / run) for run in runs})
    print(f"\n{table(figures)}\n{page}, {output / 'study.png'}")
    report = {
        "benchmark": "study",
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "command": " ".join(["python -m train.study --config", name, *overrides]),
        "commit": toolkit().get("commit"),
        "figures": figures,
    }
    print(json.dumps(report))
    return 0


def commands(base: str, common: list[str], runs: dict[str, list[str]], output: Path) -> list[list[str]]:
    """Returns the commands of a study, in order: hidden states where a run is the first of its text, then the run.

    Raises:
        UserError: the settings of a run are wrong, so that a misspelt key is found before hours of work.
    """
    found: list[list[str]] = []
    shared: dict[str, str] = {}
    for run, own in runs.items():
        own = [*(flag.replace("{output}", str(output)) for flag in own), f"output={output / run}"]
        hidden = str(output / "hidden")
        config = load_config(base, [*common, f"data.hidden_states={hidden}", *own])
        if config.data.heldout is None:
            raise UserError("data.heldout is not set: a study compares acceptance length on held-out text")
        if config.data.hidden_states == hidden:  # a run can set another, or none
            text = hidden_states_of(config)
            first = text not in shared
            hidden = shared.setdefault(text, f"{hidden}-{len(shared) + 1}" if shared else hidden)
            own = [*own, f"data.hidden_states={hidden}"]
            if first:
                found.append([sys.executable, "-m", "train.hidden", "--config", base, *common, *own])
        found.append([sys.executable, "-m", "train", "--config", base, *common, *own])
    return found


def finished(command: list[str]) -> int:
    """Runs a command to its end and returns its status; after Ctrl-C, which it gets too, it has the time to save."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


def hidden_states_of(config: Config) -> str:
    """Returns all that a run's hidden states depend on: two runs with the same share them."""
    data = config.data.model_dump(exclude={"hidden_states", "keep_hidden", "cache", "heldout"})
    return json.dumps([config.target, config.dtype, config.seed, config.modules.target_hidden, data])


def run_figures(folder: Path, name: str) -> dict[str, Any]:
    """Returns the last evaluation of a finished run, with its steps and minutes."""
    training = read_provenance(folder / "final")["training"]
    last = evaluations(folder)[-1]
    return {
        "run": name,
        "steps": training["step"],
        "minutes": round(training["elapsed_seconds"] / 60, 2),
        **{key.removeprefix("eval/"): value for key, value in last.items() if key.startswith("eval/")},
    }


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """Returns the records of a run's log that hold an evaluation."""
    lines = (folder / "log.jsonl").read_bytes().splitlines()
    return [record for record in map(json.loads, lines) if "eval/acceptance_length" in record]


def table(figures: list[dict[str, Any]]) -> str:
    """Returns the markdown table of a study."""
    lines = ["| run | steps | minutes | acceptance length | survival |", "| --- | ---: | ---: | ---: | --- |"]
    for row in figures:
        survival = " / ".join(f"{row[key]:.3f}" for key in sorted(row) if key.startswith("survival_"))
        lines.append(
            f"| {row['run']} | {row['steps']} | {row['minutes']:.1f} | {row['acceptance_length']:.3f} | {survival} |"
        )
    return "\n".join(lines) + "\n"


def plot(path: Path, records: dict[str, list[dict[str, Any]]]) -> None:
    """Draws acceptance length over steps and over minutes, a line for each run and its evaluations."""
    figure, panels = new_figure(2, sharey=True)
    for axes, (key, label) in zip(panels, {"step": "step", MINUTES: "minutes of training"}.items(), strict=True):
        for number, (run, evaluated) in enumerate(records.items()):
            known = [record for record in evaluated if key in record]  # logs of earlier versions have no minutes
            lengths = [record["eval/acceptance_length"] for record in known]
            style = "o-" if number < COLOURS else "s--"
            axes.plot([record[key] for record in known], lengths, style, markersize=3, label=run)
        axes.set(xlabel=label, title="replay on held-out text")
    panels[0].set_ylabel("acceptance length")
    panels[0].legend(fontsize=8)
    save_figure(figure, path)


if __name__ == "__main__":
    sys.exit(main())
