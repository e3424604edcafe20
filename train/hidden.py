"""``python -m train.hidden --config FILE data.hidden_states=FOLDER``: writes the target's hidden states to disk.

The same config then trains from them: the target is run once, whatever the number of runs, and not by the trainer.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from mtp import Target, UserError
from mtp.commands import run_command
from train.config import available_device, load_config
from train.data import read_rows
from train.shards import write_shards


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the shards of a run; returns 0, 2 after an error that the user can fix, 130 when stopped."""
    parser = argparse.ArgumentParser(prog="python -m train.hidden", description=(__doc__ or "").splitlines()[2])
    parser.add_argument("--config", required=True, help="YAML file, here or among the shipped configs")
    parser.add_argument("--shard-rows", type=int, default=256, help="packed rows a file (default 256)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file's")
    options = parser.parse_intermixed_args(arguments)
    if options.shard_rows < 1:
        parser.error("argument --shard-rows: must be at least 1")
    return run_command(lambda: _write(options.config, options.overrides, options.shard_rows))


def _write(name: str, overrides: list[str], shard_rows: int) -> None:
    config = load_config(name, overrides)
    if config.data.hidden_states is None:
        raise UserError("data.hidden_states is not set; give the folder to write: data.hidden_states=FOLDER")
    target = Target.load(config.target, dtype=config.dtype, device=available_device(config))
    rows, contract, reports = read_rows(config, target)
    print("\n".join(report.text() for report in reports))
    folder, started = Path(config.data.hidden_states), time.monotonic()
    with tqdm(total=len(rows), unit="row", desc="hidden states", disable=None) as bar:
        for done in write_shards(
            folder,
            rows,
            target,
            target_hidden=contract.target_hidden,
            chunk_rows=config.loss.chunk_rows,
            micro_rows=config.steps.micro_rows,
            shard_rows=shard_rows,
        ):
            bar.update(done - bar.n)
            if bar.disable:
                print(f"{done} of {len(rows)} rows", flush=True)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    print(f"{folder}: {len(rows)} rows, {size / 1e6:.1f} MB, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
