"""The loop: a batch of packed rows, the frozen target's side of it, the objective, one optimizer step."""

import dataclasses
import math
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from mtp import Contract, UserError
from train.config import Config, without_effect
from train.data import FILL, Order, Rows, cache_folder, micro_batches, read_rows
from train.engine import Engine, Ranks
from train.evaluate import Evaluation, Replay
from train.initialise import new_stack
from train.objective import CELLS, DIVERGENCE, LOSS, Objective, StepLoss, objective_inputs
from train.partition import load_target
from train.provenance import toolkit, versions
from train.records import ReadReport, Record, read_records
from train.runs import RunFolder
from train.shards import Shards
from train.teacher import TeacherMemory
from train.tracking import MINUTES, Tracker


def learning_rate(config: Config, progress: float) -> float:
    """Returns the rate at a progress in 0..1: linear warm-up, then as scheduled to the smallest."""
    options = config.optimizer
    if progress < options.warmup_fraction:
        return options.learning_rate * max(progress / options.warmup_fraction, 0.01)
    rest = min((progress - options.warmup_fraction) / max(1 - options.warmup_fraction, 1e-9), 1.0)
    height = {"cosine": 0.5 * (1 + math.cos(math.pi * rest)), "linear": 1 - rest, "constant": 1.0}[options.schedule]
    return options.learning_rate * (options.min_lr_fraction + (1 - options.min_lr_fraction) * height)


class StopSignal:
    """Remembers SIGINT and SIGTERM, so that the loop ends after the step at hand and saves."""

    def __init__(self) -> None:
        self.received = False
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}

    def _note(self, number: int, frame: Any) -> None:
        self.received = True

    def restore(self) -> None:
        """Gives the signals back to whoever handled them before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Trainer:
    """One run, from its settings to its final checkpoint."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        """Reads target and data and makes modules, engine and folder.

        Raises:
            UserError: anything the user can fix, named.
        """
        self.config, self.ranks = config, ranks
        config.modules.contract(None)  # refuse a wrong recurrence before minutes of loading
        self.folder = RunFolder(config, ranks)
        self.step, self.elapsed, self.trained_tokens, self.wandb_id = 0, 0.0, 0, None
        self.evaluated, self.best = 0, -math.inf  # the last step evaluated; the greatest acceptance length
        self.complete = self.folder.complete()
        ranks.barrier()
        if self.complete:
            return
        resumed = self.folder.newest_state()
        torch.manual_seed(config.seed)
        self.target = load_target(config, ranks.device)
        self._read_data()
        with self.target.whole_ends():
            stack = new_stack(self.contract, self.target, config.init)
        stack.activation_checkpointing = config.activation_checkpointing
        self.frozen = sum(not any(each.requires_grad for each in layer.parameters()) for layer in stack.layers)
        if not self.supervised[self.frozen]:
            raise UserError(
                f"{config.data.names}: no record is long enough to teach module {self.frozen + 1}, the first one to "
                "train; give longer ones"
            )
        self.engine = Engine(config, Objective(stack, config.loss.chunk_rows), ranks)
        self.warnings: list[str] = []
        if resumed is not None:
            self._resume(*resumed)
        if self.total_steps is not None and self.step > self.total_steps:
            raise UserError(
                f"output {self.folder.path} is at step {self.step} already, past the {self.total_steps} steps that "
                "steps.max_steps and steps.epochs allow now; raise them, or choose another output"
            )

    def _read_data(self) -> None:
        data, modules = self.config.data, self.config.modules
        self.reports: list[ReadReport]
        (self.rows, self.contract, self.reports), heldout = self.ranks.first(self._read_sources)
        self.rows_sha256 = self.rows.sha256()
        self.supervised = self.rows.supervised(modules.depths).tolist()
        self.order = Order(len(self.rows), self.config.steps.rows_per_step, self.config.seed)
        point, chunk = self.contract.target_hidden, self.config.loss.chunk_rows
        self.soft = self.config.loss.kind != "cross_entropy"
        self.teacher: TeacherMemory | Shards = TeacherMemory(
            self.target, target_hidden=point, chunk_rows=chunk, keep=data.keep_hidden, soft=self.soft
        )
        if data.hidden_states:
            self.teacher = Shards(Path(data.hidden_states), self.rows, self.target, target_hidden=point)
        self.replay: Replay | None = None
        if heldout:
            self.replay = Replay(*heldout, self.target, target_hidden=point, chunk_rows=chunk, keep=data.keep_hidden)
            self.reports.append(heldout[1])

    def _read_sources(self) -> tuple[tuple[Rows, Contract, list[ReadReport]], tuple[list[Record], ReadReport] | None]:
        """Returns what :func:`read_rows` does, and the held-out records if there are any; rank 0 writes the cache."""
        heldout, write = self.config.data.heldout, self.ranks.rank == 0
        rows = read_rows(self.config, self.target, write_cache=write)
        cache = cache_folder(self.config)
        return rows, read_records(heldout, self.target, cache=cache, write=write) if heldout else None

    @property
    def total_steps(self) -> int | None:
        """Returns the number of steps that epochs and max_steps allow; None if only time limits the run."""
        steps = self.config.steps
        limits = [steps.max_steps, steps.epochs and steps.epochs * self.order.steps_per_epoch]
        return min((limit for limit in limits if limit), default=None)

    def _resume(self, folder: Path, facts: dict[str, Any], warnings: list[str]) -> None:
        if facts["rows_sha256"] != self.rows_sha256:
            raise UserError(
                f"{self.config.data.names}: its content is not what step {facts['step']} in {folder} was trained on; "
                "give the file as it was, or choose another output"
            )
        if facts["target_fingerprint"] != self.target.fingerprint():
            raise UserError(
                f"target {self.config.target!r}: its weights are not those that step {facts['step']} in {folder} was "
                "trained on; give the target as it was, or choose another output"
            )
        self.engine.load_state(folder)
        self.step, self.elapsed, self.trained_tokens = facts["step"], facts["elapsed"], facts["tokens"]
        self.evaluated, self.best, self.wandb_id = facts["evaluated"], facts["best"], facts["wandb_id"]
        self.warnings = warnings

    def run(self) -> None:
        """Trains to the end, or until a signal or a limit, and saves.

        Raises:
            UserError: the loss is not finite; the last checkpoint is kept.
        """
        stop = StopSignal()
        tracker = None
        if self.ranks.rank == 0:
            tracker = Tracker(
                self.config,
                resume_step=self.step,
                total_steps=self.total_steps,
                wandb_id=self.wandb_id,
                about=self._about(),
            )
            self.wandb_id = tracker.wandb_id
            self._introduce(tracker)
        try:
            self._loop(stop, tracker)
        finally:
            stop.restore()
            if tracker:
                tracker.close()

    def _introduce(self, tracker: Tracker) -> None:
        unread = [f"warning: {each}" for each in without_effect(self.config)]
        for text in [*self.warnings, *unread, *(report.text() for report in self.reports)]:
            tracker.say(text)
        cells = ", ".join(f"module {index}: {count}" for index, count in enumerate(self.supervised, start=1))
        epoch = f"{len(self.rows)} packed rows, {self.order.steps_per_epoch} steps an epoch"
        tracker.say(f"{epoch}; supervised cells: {cells}")
        if self.contract.draft_vocab is not None:
            kept = f"{len(self.contract.draft_vocab)} of {self.target.vocab_size} tokens"
            tracker.say(
                f"draft vocabulary: {kept}, {self.reports[0].vocab_coverage:.2%} of the training text's tokens to learn"
            )
        if 0 in self.supervised:
            tracker.say("warning: a module without supervised cells is not trained; the records are too short for it")
        if self.step:
            tracker.say(f"resumed from step {self.step}")

    def _progress(self) -> float:
        """Returns how much of the run is done, 0..1, by steps or by time, whichever is further."""
        by_steps = self.step / self.total_steps if self.total_steps else 0.0
        minutes = self.config.steps.max_minutes
        return max(by_steps, self.elapsed / 60 / minutes if minutes else 0.0)

    def _seconds_left(self, started: float, seconds: float) -> float | None:
        """Returns the seconds to the end at the speed since the start; None before there is a speed."""
        done = self._progress() - started
        return seconds / done * max(1 - self._progress(), 0) if done > 0 else None

    def _agree(self, stop: StopSignal) -> tuple[float, bool]:
        """Returns progress as rank 0 sees it and whether any rank was told to stop."""
        mine = self._progress() if self.ranks.rank == 0 else 0.0
        progress, stopped = self.ranks.max([mine, float(stop.received)])
        return progress, bool(stopped)

    def _loop(self, stop: StopSignal, tracker: Tracker | None) -> None:
        config = self.config
        before, resumed, started = self.elapsed, time.monotonic(), self._progress()
        tokens, seconds, interrupted = 0, 0.0, False
        while True:
            progress, interrupted = self._agree(stop)
            if progress >= 1 or interrupted:
                break
            began = time.monotonic()
            figures, batch_tokens = self._step(progress)
            now = time.monotonic()
            tokens, seconds, self.elapsed = tokens + batch_tokens, seconds + now - began, before + now - resumed
            if tracker:
                tracker.advance(self._seconds_left(started, now - resumed))
                if self.step % config.log_every == 0 or self.step == 1:
                    figures["train/tokens_per_second"] = tokens / max(seconds, 1e-9)
                    figures[MINUTES] = self.elapsed / 60
                    tracker.record(self.step, figures)
                    tokens, seconds = 0, 0.0
            if config.evaluate_every and self.step % config.evaluate_every == 0:
                self._evaluate(tracker)
            if config.checkpoint_every and self.step % config.checkpoint_every == 0:
                self._save(f"step-{self.step}")
            self.elapsed = before + time.monotonic() - resumed
        if interrupted and progress < 1:
            self._save(f"step-{self.step}")
            if tracker:
                tracker.say(f"stopped by a signal after step {self.step}, saved; run the same command to go on")
            return
        if not self.trained_tokens:
            raise UserError(
                f"{config.data.names}: not one token to learn in {self.step} steps, so nothing was trained; raise the "
                "limits in steps, or set data.supervise: all"
            )
        if self.evaluated != self.step:
            self._evaluate(tracker)
        self._save("final")
        if tracker:
            final = self.folder.path / "final"
            tracker.say(f"done: {self.step} steps, {self.elapsed / 60:.1f} minutes, modules in {final}")

    def _step(self, progress: float) -> tuple[dict[str, float], int]:
        """Runs one optimizer step and returns its figures and the tokens of the global batch."""
        rate, step_loss = learning_rate(self.config, progress), StepLoss.at(self.config.loss, progress)
        ranks, depths = self.ranks, self.config.modules.depths
        indices = self.order.step(self.step)
        whole = self.rows.take(indices, "cpu")
        # Every rank knows the whole step's rows, so the global counts need no communication.
        cells = whole.supervised(depths).to(ranks.device)
        weights = torch.tensor(step_loss.weights(self.config.loss, depths), device=ranks.device)
        scales = weights * self.engine.accumulation * ranks.world_size / cells.clamp(min=1)
        self.engine.set_learning_rate(rate)
        parts: list[Tensor] = []
        share = micro_batches(indices, self.config.steps.micro_rows, rank=ranks.rank, world_size=ranks.world_size)
        for batch in share:
            rows = self.rows.take(batch, ranks.device)
            with self.target.whole_ends():
                inputs = objective_inputs(rows, self.teacher(batch, rows))
                parts.append(self.engine.micro_step(inputs, scales, step_loss))
        totals = ranks.sum(torch.stack(parts).sum(0))
        self.step += 1
        losses, divergences = (totals[which] / totals[CELLS].clamp(min=1) for which in (LOSS, DIVERGENCE))
        loss = float((losses * weights).sum())
        norm = self.engine.gradient_norm
        if not (math.isfinite(loss) and math.isfinite(norm)):
            wrong = [batch for batch, part in zip(share, parts, strict=True) if not part.isfinite().all()]
            self._stop_at(ranks.gather([row for batch in wrong for row in batch]) or indices, loss, norm)
        self.trained_tokens += int(cells[self.frozen])  # a later module has no cell where the first to train has none
        figures = {"train/loss": loss, "train/lr": rate, "train/grad_norm": norm}
        for depth in range(depths):
            figures[f"train/loss_{depth + 1}"] = float(losses[depth])
            if self.soft:
                figures[f"train/kl_{depth + 1}"] = float(divergences[depth])
        return figures, int((whole.documents >= 0).sum())

    def _stop_at(self, indices: list[int], loss: float, norm: float) -> NoReturn:
        """Raises :class:`UserError` that names the rows whose loss or gradient is not finite."""
        numbers = sorted(set(indices) - {FILL})
        begin = self.rows.tokens[numbers[0]][self.rows.documents[numbers[0]] == 0][:8].tolist() if numbers else []
        newest = self.folder.checkpoints()
        kept = f"the last checkpoint, {newest[0]}, is from before it" if newest else "no checkpoint was saved before it"
        raise UserError(
            f"step {self.step}: the loss is {loss} and the norm of its gradient {norm}, in packed rows "
            f"{', '.join(map(str, numbers[:8]))}{' ...' if len(numbers) > 8 else ''} of {self.config.data.names} (the "
            f"first begins with token ids {begin}); stopped, {kept}; lower optimizer.learning_rate, look at those "
            "records, or check the target's dtype"
        )

    def _evaluate(self, tracker: Tracker | None) -> None:
        if self.replay is None:
            return
        ranks = self.ranks
        with self.target.whole_ends():
            mine = self.replay.run(self.engine.stack, rank=ranks.rank, world_size=ranks.world_size, device=ranks.device)
        figures = Evaluation.from_tensor(ranks.sum(mine.tensor().to(ranks.device)).cpu()).record()
        self.evaluated, length = self.step, figures["eval/acceptance_length"]
        if tracker:
            tracker.record(self.step, figures | {MINUTES: self.elapsed / 60})
        if length > self.best:
            self.best = length
            training = self._provenance() | {"eval/acceptance_length": length}
            self.folder.save_modules("best", self.engine, self.contract, self.target, training)

    def _save(self, name: str) -> None:
        facts = {
            "step": self.step,
            "elapsed": self.elapsed,
            "tokens": self.trained_tokens,
            "world_size": self.ranks.world_size,
            "evaluated": self.evaluated,
            "best": self.best,
            "rows_sha256": self.rows_sha256,
            "target_fingerprint": self.target.fingerprint(),
            "wandb_id": self.wandb_id,
        }
        self.folder.save(name, self.engine, self.contract, self.target, facts, self._provenance())

    def _about(self) -> dict[str, Any]:
        """Returns what a reader of the run's figures asks for, beside its config."""
        vocab = self.contract.draft_vocab
        contract = dataclasses.asdict(self.contract) | {"draft_vocab": vocab and len(vocab)}
        kept = ("processes", "zero_stage", "data", "versions", "toolkit")
        return {"contract": contract, **{key: value for key, value in self._provenance().items() if key in kept}}

    def _provenance(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "trained_tokens": self.trained_tokens,
            "elapsed_seconds": round(self.elapsed, 1),
            "processes": self.ranks.world_size,
            "zero_stage": self.engine.stage,
            "config": self.config.model_dump(mode="json"),
            "draft_vocab_coverage": round(self.reports[0].vocab_coverage, 6),
            "data": [{"file": each.path, "sha256": each.sha256, "records": each.records} for each in self.reports],
            "versions": versions(),
            "toolkit": toolkit(),
        }
