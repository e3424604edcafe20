"""``deepspeed --module train --config x.yaml [key=value ...]``, or ``python -m train ...`` for one process."""

import argparse
import os
import sys
import time
from collections.abc import Sequence

import torch
import transformers

from mtp import UserError
from train.config import Config, available_device, load_config, without_effect
from train.estimate import estimate

USAGE = """%(prog)s --config FILE [--dry-run [--ranks N]] [dotted.key=value ...]
       deepspeed --num_accelerators N --module train --config FILE [dotted.key=value ...]"""


def parse(arguments: Sequence[str]) -> tuple[Config, int]:
    """Returns the run's settings and, for a dry run, the number of ranks (else 0).

    Raises:
        UserError: what is wrong with the settings.
    """
    parser = argparse.ArgumentParser(prog="python -m train", usage=USAGE, description="Trains MTP modules.")
    parser.add_argument("--config", required=True, help="YAML file, here or among the shipped configs")
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
    parser.add_argument("--dry-run", action="store_true", help="print weights, memory, disk, steps; load no weights")
    parser.add_argument("--ranks", type=int, help="of a dry run: on how many (default: as launched)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file's")
    known, extra = parser.parse_known_intermixed_args(arguments)
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if known.ranks is None else known.ranks
    if ranks < 1 or (known.ranks and not known.dry_run):
        parser.error("argument --ranks: at least 1, and only with --dry-run; the launcher sets the ranks of a run")
    return load_config(known.config, [*known.overrides, *extra]), ranks if known.dry_run else 0


def train(config: Config) -> None:
    """Runs a training to its end; raises :class:`UserError` for what the user can fix."""
    device = available_device(config)
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # deepspeed looks once, when it is imported
    from train.engine import Ranks
    from train.trainer import Trainer

    ranks = Ranks(device)
    trainer = Trainer(config, ranks)
    if trainer.complete:
        if ranks.rank == 0:
            print(f"already complete: {trainer.folder.path / 'final'} has these settings")
    else:
        trainer.run()
    ranks.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 2 after an error that the user can fix, or 130 if interrupted while it starts."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        config, dry_ranks = parse(sys.argv[1:] if arguments is None else arguments)
        if not dry_ranks:
            train(config)
        elif os.environ.get("RANK", "0") == "0":
            print(estimate(config, dry_ranks).text(config))
            print("".join(f"warning: {each}\n" for each in without_effect(config)), end="")
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        if rank == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        elif joined:
            print(f"error: process {rank}: {error}", file=sys.stderr, flush=True)
        if rank != "0":
            time.sleep(2)  # the launcher kills all once one has left: let rank 0 have its say
        return 2
    except RuntimeError as error:
        if "closed by peer" not in str(error) and "reset by peer" not in str(error):
            raise
        # Another process has left, after saying why: nothing that this one could add.
        print(f"process {os.environ['RANK']}: another process has left, so this one does", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("stopped before the first step; run the same command to start", file=sys.stderr, flush=True)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
