"""Where figures go: ``log.jsonl`` always, a bar or plain lines for people, wandb when it is configured.

Only rank 0 makes a tracker. wandb gets its own step metric, so a resumed run never loses points to
its monotone counter.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from mtp import UserError
from mtp.files import append_line, open_lines, write_atomic
from train.config import Config

STEP, MINUTES = "train/step", "train/minutes"
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]"  # ETA: ours, it knows the time limit too


class Tracker:
    """Writes records of the run; a resumed run continues the same log and the same wandb run."""

    def __init__(
        self,
        config: Config,
        *,
        resume_step: int,
        total_steps: int | None,
        wandb_id: str | None,
        about: dict[str, Any],
    ) -> None:
        """Opens the log, cut back to the step that the run resumes from.

        Args:
            about: what wandb's config gets beside the run's settings.

        Raises:
            UserError: the log cannot be written.
        """
        self.path = Path(config.output) / "log.jsonl"
        try:
            self._file = _open_log(self.path, resume_step)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror}); choose another output") from None
        self._shown: dict[str, str] = {}
        self._seconds_left: float | None = None
        self._bar: Any = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=total_steps, initial=resume_step, desc="train", unit="step", dynamic_ncols=True, bar_format=BAR
            )
        self._wandb = _start_wandb(config, wandb_id, about) if config.wandb else None
        self.wandb_id = self._wandb.id if self._wandb else None

    def record(self, step: int, figures: dict[str, float]) -> None:
        """Writes one record of a step."""
        self._log({"step": step, **figures})
        if self._wandb:
            self._wandb.log({**figures, STEP: step})
        summary = _summary(figures)
        if self._seconds_left is not None and "train/loss" in figures:
            summary["ETA"] = tqdm.format_interval(self._seconds_left)
        self._shown |= summary
        if self._bar is not None:
            self._bar.set_postfix(self._shown)
        else:
            self.say(f"step {step}: " + ", ".join(f"{name} {value}" for name, value in summary.items()))

    def _log(self, record: dict[str, Any]) -> None:
        """Writes a line; a disk that refuses costs the line, never the training."""
        try:
            append_line(self._file, json.dumps(record))
        except OSError as error:
            self.say(f"warning: {self.path}: step {record['step']} is not logged ({error.strerror})")

    def advance(self, seconds_left: float | None) -> None:
        """Moves the bar by one step; the seconds to the end are shown with the next record."""
        self._seconds_left = seconds_left
        if self._bar is not None:
            self._bar.update()

    def say(self, text: str) -> None:
        """Prints a line without breaking the bar."""
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Ends bar, log and wandb run."""
        if self._bar is not None:
            self._bar.close()
        self._file.close()
        if self._wandb:
            self._wandb.finish()


def _summary(figures: dict[str, float]) -> dict[str, str]:
    shown = {
        "train/loss": ("loss", "{:.4f}"),
        "eval/acceptance_length": ("acceptance length", "{:.3f}"),
        "train/tokens_per_second": ("tokens/s", "{:.0f}"),
    }
    return {name: form.format(figures[key]) for key, (name, form) in shown.items() if key in figures}


def _open_log(path: Path, resume_step: int) -> BinaryIO:
    """Opens the log at its end, later steps than the one resumed from removed."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if _is_until(line, resume_step)]
    if kept != lines:
        write_atomic(path, b"".join(kept))
    return open_lines(path)


def _is_until(line: bytes, step: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False  # the half-written last line of a killed run


def _start_wandb(config: Config, run_id: str | None, about: dict[str, Any]) -> Any:
    import wandb

    assert config.wandb is not None
    mode: Any = config.wandb.mode or os.environ.get("WANDB_MODE") or None
    if mode is None and not _has_key(wandb):
        mode = "offline"
        print(f"wandb: no key found, the run is logged offline in {config.output}/wandb (send it with `wandb sync`)")
    try:
        run = wandb.init(
            project=config.wandb.project,
            name=config.wandb.name,
            id=run_id,
            resume="allow" if run_id else None,
            mode=mode,
            dir=config.output,
            config={**config.model_dump(mode="json"), **about},
            settings=wandb.Settings(silent=True, console="off"),
        )
    except (wandb.Error, OSError) as error:
        raise UserError(f"wandb could not start ({error}); set wandb.mode: offline, or wandb: null") from None
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP)
    return run


def _has_key(wandb: Any) -> bool:
    try:
        return bool(os.environ.get("WANDB_API_KEY") or wandb.api.api_key)
    except Exception:  # a broken netrc, say: offline is the safe choice
        return False
