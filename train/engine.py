"""The only file that knows deepspeed: processes, the engine, gradients, weights and state of any ZeRO stage."""

import itertools
import logging
import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from mtp import UserError
from mtp.errors import one_line
from train.config import Config, accumulation, read_deepspeed
from train.objective import Objective, StepLoss

STATE_TAG = "state"  # the folder that deepspeed makes inside of ours
Result = TypeVar("Result")
OWNED = {
    "optimizer": "optimizer.learning_rate, weight_decay and betas",
    "scheduler": "optimizer.schedule, warmup_fraction and min_lr_fraction",
    "fp16": "dtype (float32 or bfloat16)",
}


class Ranks:
    """The processes of the run: rank, world size, and the few collectives the trainer needs."""

    def __init__(self, device: str) -> None:
        """Joins the launcher's processes, or makes a group of one where there is no launcher.

        Raises:
            UserError: the processes cannot reach each other.
        """
        deepspeed.utils.logger.setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        # gloo alone is enough on CPU; deepspeed would compile its own shared-memory kernels first.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if "RANK" not in os.environ:
            lonely = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
            os.environ.update(lonely, MASTER_PORT=str(_free_port()))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if device == "cuda":
            torch.cuda.set_device(local_rank)
        elif "OMP_NUM_THREADS" not in os.environ:
            local_size = int(os.environ.get("LOCAL_SIZE", os.environ["WORLD_SIZE"]))
            torch.set_num_threads(max(1, torch.get_num_threads() // local_size))
        try:
            deepspeed.init_distributed("nccl" if device == "cuda" else "gloo", verbose=False)
        except (RuntimeError, ValueError) as error:
            size = os.environ["WORLD_SIZE"]
            raise UserError(f"the {size} processes could not join ({error}); see the launcher's flags") from error
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum over ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: list[float]) -> list[float]:
        """Returns the largest of each value over ranks."""
        return self._reduce(torch.tensor(values, dtype=torch.float64, device=self.device), dist.ReduceOp.MAX).tolist()

    def gather(self, values: list[Any]) -> list[Any]:
        """Returns every rank's values (few and small ones) in one list, in the order of ranks."""
        parts: list[Any] = [None] * self.world_size
        dist.all_gather_object(parts, values)
        return list(itertools.chain.from_iterable(parts))

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.max([0.0])

    def first(self, work: Callable[[], Result]) -> Result:
        """Returns what the work gives, done by rank 0 before the others, who find in files what it has left there.

        Raises:
            UserError: rank 0's work did; on every rank, so that none waits for it.
        """
        failed: UserError | None = None
        if self.rank == 0:
            try:
                done = work()
            except UserError as error:
                failed = error
        if self.max([float(failed is not None)])[0]:
            raise failed or UserError("stopped, as process 0 was")
        return done if self.rank == 0 else work()

    def close(self) -> None:
        """Leaves the group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _reduce(self, values: Tensor, operation: Any) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, op=operation)
        return values


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def engine_settings(config: Config, world_size: int) -> dict[str, Any]:
    """Returns the deepspeed config of a run: the user's, completed by what the run's own config says.

    Raises:
        UserError: the two contradict each other, or the user's sets what the run's config owns.
    """
    settings = read_deepspeed(config.deepspeed)
    for key, owner in OWNED.items():
        if key in settings and settings[key] not in (None, {}, {"enabled": False}):
            raise UserError(f"deepspeed config: {key!r} is set by the run's own config ({owner}); remove it")
    ours = {
        "train_batch_size": ("steps.rows_per_step", config.steps.rows_per_step),
        "train_micro_batch_size_per_gpu": ("steps.micro_rows", config.steps.micro_rows),
        "gradient_accumulation_steps": (
            f"steps.rows_per_step / (steps.micro_rows * {world_size} processes)",
            accumulation(config, world_size),
        ),
        "gradient_clipping": ("optimizer.gradient_clip", config.optimizer.gradient_clip or 0.0),
    }
    for key, (owner, value) in ours.items():
        theirs = settings.get(key, "auto")
        if theirs not in ("auto", value):
            raise UserError(
                f"deepspeed config: {key} is {theirs!r}, but {owner} makes it {value}; remove it there, or make "
                "them agree"
            )
        settings[key] = value
    bfloat16 = config.dtype == "bfloat16"
    if settings.get("bf16", {}).get("enabled", bfloat16) not in (bfloat16, "auto"):
        raise UserError(f"deepspeed config: bf16.enabled contradicts dtype = {config.dtype}; remove it there")
    settings["bf16"] = {**settings.get("bf16", {}), "enabled": bfloat16}
    settings.setdefault("zero_allow_untested_optimizer", True)
    settings.setdefault("zero_force_ds_cpu_optimizer", False)
    settings.setdefault("steps_per_print", 10**9)
    return settings


class Engine:
    """The deepspeed engine around the objective."""

    def __init__(self, config: Config, objective: Objective, ranks: Ranks) -> None:
        """Makes optimizer and engine.

        Raises:
            UserError: deepspeed refuses the settings; its message is passed on.
        """
        self.accumulation = accumulation(config, ranks.world_size)
        settings = engine_settings(config, ranks.world_size)
        self.stage = settings.get("zero_optimization", {}).get("stage", 0)
        options = config.optimizer
        optimizer = torch.optim.AdamW(
            parameter_groups(objective, options.weight_decay), lr=options.learning_rate, betas=options.betas
        )
        try:
            self._engine, self._optimizer, _, _ = deepspeed.initialize(
                model=objective, optimizer=optimizer, config=settings, dist_init_required=False
            )
        except (ValueError, TypeError, AssertionError, KeyError, NotImplementedError) as error:
            raise UserError(f"deepspeed refused its settings: {' '.join(str(error).split())[:400]}") from error
        self._engine.train()

    @property
    def stack(self) -> Any:
        """Returns the modules, for forwards without gradient."""
        return self._engine.module.stack

    def micro_step(self, inputs: tuple[Tensor, ...], scales: Tensor, step_loss: StepLoss) -> Tensor:
        """Runs forward and backward of one micro batch and, at the last of a step, the optimizer.

        Returns:
            The statistics of :meth:`Objective.forward`, [3, k].
        """
        loss, statistics = self._engine(*inputs, scales, step_loss)
        self._engine.backward(loss)
        if self._engine.is_gradient_accumulation_boundary():
            self._norm = self._norm_before_step()
        self._engine.step()
        return statistics

    def set_learning_rate(self, value: float) -> None:
        """Sets the learning rate of the next step."""
        for group in self._optimizer.param_groups:
            group["lr"] = value

    @property
    def gradient_norm(self) -> float:
        """Returns the norm of the last step's gradient, before clipping."""
        known = self._engine.get_global_grad_norm()
        return float(self._norm if known is None else known)

    def _norm_before_step(self) -> float:
        gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) if self.stage == 0 else 0.0

    def weights(self) -> dict[str, Tensor] | None:
        """Returns the stack's state dict in full shapes on rank 0 (None elsewhere); every rank must call it."""
        rank, collected = dist.get_rank(), {}
        for name, tensor in self.stack.state_dict(keep_vars=True).items():
            partitioned = [tensor] if hasattr(tensor, "ds_id") else []
            with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
                if rank == 0:
                    collected[name] = tensor.detach().to("cpu", copy=True)
        return collected if rank == 0 else None

    def save_state(self, folder: Path) -> None:
        """Writes what a resume needs (every rank its part, random state included); every rank must call it."""
        self._engine.save_checkpoint(str(folder), tag=STATE_TAG, save_latest=False)
        torch.save(_random_state(), self._random_file(folder))

    def load_state(self, folder: Path) -> None:
        """Restores a saved state; every rank must call it.

        Raises:
            UserError: the files are incomplete, or of another deepspeed or ZeRO stage.
        """
        try:
            loaded, _ = self._engine.load_checkpoint(str(folder), tag=STATE_TAG)
            random = torch.load(self._random_file(folder), weights_only=True)
        except Exception as error:  # whatever another version's files make of deepspeed
            raise UserError(
                f"{folder}: this deepspeed cannot read the state ({one_line(error)[:200]}); resume with the version "
                "that wrote it, or choose another output"
            ) from error
        if loaded is None:
            raise UserError(f"{folder}: the state is incomplete; choose another output")
        _set_random_state(random)

    @staticmethod
    def _random_file(folder: Path) -> Path:
        return folder / STATE_TAG / f"random-{dist.get_rank()}.pt"


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else state


def _set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def parameter_groups(objective: Objective, weight_decay: float) -> list[dict[str, Any]]:
    """Returns the optimizer's groups: matrices with weight decay, the rest without; frozen ones in neither."""
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
