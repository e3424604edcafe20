"""Hidden states from shards: the same loss as on line, resumable, and never those of something else."""

import json

import pytest
import torch

from mtp import UserError
from tests.builders import make_target
from tests.train.conftest import write_lines
from train.data import FILL, pack
from train.hidden import main
from train.records import Record
from train.shards import Shards, write_shards
from train.teacher import teach


def make_rows(seed=0):
    records = [Record(list(range(3 + seed, 3 + seed + n)), [True] * n, 1) for n in (9, 4, 12, 7, 12, 11, 3)]
    return pack(records, 12, 0)


def write(folder, rows, target, **more):
    options = {"target_hidden": "post_norm", "chunk_rows": 5, "micro_rows": 2, "shard_rows": 3} | more
    return list(write_shards(folder, rows, target, **options))


@pytest.mark.parametrize("point", ["post_norm", "pre_norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_back_as_the_target_gives_them(tmp_path, point, dtype):
    target, rows = make_target(dtype=dtype), make_rows()
    assert write(tmp_path, rows, target, target_hidden=point) == [3, len(rows)]
    shards = Shards(tmp_path, rows, target, target_hidden=point)
    indices = [4, 0, FILL, 2]
    taken = rows.take(indices, "cpu")
    expected = teach(target, taken, target_hidden=point, chunk_rows=64)
    for ours, theirs in zip(shards(indices, taken), expected, strict=True):
        assert ours.dtype == theirs.dtype
        real = torch.tensor([True, True, False, True])
        noise = 1e-5 if dtype == torch.float32 else 3e-2  # forwards of other batches: equal up to arithmetic
        torch.testing.assert_close(ours[real].float(), theirs[real].float(), rtol=noise, atol=noise)
        assert not ours[2].any()


def test_a_stopped_command_goes_on_and_writes_no_shard_twice(tmp_path):
    target, rows = make_target(), make_rows()
    writing = write_shards(tmp_path, rows, target, target_hidden="post_norm", chunk_rows=5, micro_rows=2, shard_rows=2)
    assert next(writing) == 2
    writing.close()
    (tmp_path / "shard-00001.partial").write_bytes(b"half of one")
    with pytest.raises(UserError, match=f"2 of {len(rows)} rows"):
        Shards(tmp_path, rows, target, target_hidden="post_norm")
    stamp = (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns
    assert write(tmp_path, rows, target, shard_rows=2)[-1] == len(rows)
    assert (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns == stamp
    assert write(tmp_path, rows, target, shard_rows=2) == []


def test_shards_of_something_else_or_damaged_are_refused(tmp_path):
    target, rows = make_target(), make_rows()
    write(tmp_path, rows, target)
    for other_rows, other_target, point, named in (
        (make_rows(1), target, "post_norm", "rows_sha256"),
        (rows, make_target(seed=1), "post_norm", "target_fingerprint"),
        (rows, make_target(dtype=torch.bfloat16), "post_norm", "dtype"),
        (rows, target, "pre_norm", "target_hidden"),
    ):
        with pytest.raises(UserError, match=named):
            Shards(tmp_path, other_rows, other_target, target_hidden=point)
    with pytest.raises(UserError, match="rows_sha256"):
        write(tmp_path, make_rows(1), target)
    path = tmp_path / "shard-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    shards = Shards(tmp_path, rows, target, target_hidden="post_norm")
    shards([0], rows.take([0], "cpu"))
    with pytest.raises(UserError, match="shard-00001"):
        shards([3], rows.take([3], "cpu"))
    (tmp_path / "shards.json").write_text("{}")
    with pytest.raises(UserError, match="damaged"):
        Shards(tmp_path, rows, target, target_hidden="post_norm")
    with pytest.raises(UserError, match=r"train\.hidden"):
        Shards(tmp_path / "nowhere", rows, target, target_hidden="post_norm")


def test_training_from_shards_is_training_on_line(run, capsys):
    heldout = write_lines(run.folder / "shards-heldout.jsonl", [{"prompt_ids": [5, 6], "response_ids": [7, 8, 9, 4]}])
    more = {"data.heldout": heldout, "steps.max_steps": 4, "steps.micro_rows": 1}
    folder = run.folder / "hidden"
    assert run("on-line", **more).returncode == 0
    arguments = run.settings("from-shards", **more, **{"data.hidden_states": folder})
    assert main([*arguments, "--shard-rows", "4"]) == 0
    assert "MB" in capsys.readouterr().out
    done = run("from-shards", ranks=2, **more, **{"data.hidden_states": folder})
    assert done.returncode == 0, done.stdout + done.stderr
    names = ["train/loss", "train/loss_3", "train/grad_norm"]
    curves = [torch.tensor(run.curve(output, *names)) for output in ("on-line", "from-shards")]
    torch.testing.assert_close(*curves, rtol=1e-5, atol=1e-5)
    assert json.loads((folder / "shards.json").read_text())["key"]["shard_rows"] == 4


def test_without_a_folder_the_command_says_so(run, capsys):
    assert main(run.settings("nothing")) == 2
    assert "data.hidden_states" in capsys.readouterr().err
