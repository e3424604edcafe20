import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from train import benchmark_throughput as throughput
from train.benchmark_memory import BASE, GRID, SOFT, build, main, plain_loss, step
from train.objective import StepLoss, depth_weights, objective_inputs
from train.teacher import teach

CHUNK, VOCAB = 16, 8192
PNG = b"\x89PNG"


def test_the_plain_way_is_the_same_loss():
    objective, rows = build(256, 2, 128, 16, "cpu")
    teacher = teach(objective.stack.target, rows, target_hidden="post_norm", chunk_rows=16)
    scales = rows.supervised(2).float().reciprocal()
    scales *= scales.new_tensor(depth_weights(0.6, 2))
    loss, _ = objective(*objective_inputs(rows, teacher), scales, StepLoss("soft"))
    assert abs(loss.item() - plain_loss(objective, rows).item()) < 1e-4


class LargestTensor(TorchDispatchMode):
    """Sees every tensor that any operation makes, forward and backward, but the head's weight and its views."""

    def __init__(self, weight):
        super().__init__()
        self.elements, self.weight = 0, weight.untyped_storage().data_ptr()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() != self.weight:
                self.elements = max(self.elements, tensor.numel())
        return out


def largest(way, rows, k, loss=SOFT):
    objective, batch = build(rows, k, VOCAB, CHUNK, "cpu")
    with LargestTensor(objective.stack.head.weight) as seen:
        step(objective, batch, way, loss)
    return seen.elements


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("loss", [SOFT, StepLoss("hard"), StepLoss("soft", 0.5), StepLoss("end_to_end")])
def test_no_tensor_of_a_step_grows_with_rows_times_vocabulary(k, loss):
    """Exact where resident memory would be a matter of the allocator; `main` prints that."""
    assert largest("chunked", 256, k, loss) == largest("chunked", 512, k, loss) == CHUNK * VOCAB


def test_the_plain_way_has_them():
    assert largest("plain", 512, 3) >= 500 * VOCAB


def test_the_benchmark_ends_with_one_json_line_and_a_plot(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("train.benchmark_memory.GRID", [(256, 1, 128)])
    monkeypatch.setattr("train.benchmark_memory.BASE", (256, 1, 128))
    assert main(["--plot", str(tmp_path / "memory.png")]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert figures[0].keys() >= {"modules", "chunked", "plain"}
    assert (tmp_path / "memory.png").read_bytes().startswith(PNG)


def test_each_factor_grows_alone_over_the_grid():
    for place in range(3):
        assert len({case for case in GRID if case[:place] + case[place + 1 :] == BASE[:place] + BASE[place + 1 :]}) == 3


def test_the_throughput_of_every_way_is_drawn(tmp_path, capsys, monkeypatch):
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for name, value in {"VOCAB": 64, "DRAFT_VOCAB": 16, "SIZES": tiny}.items():
        monkeypatch.setattr(throughput, name, value)
    assert throughput.main(["--batches", "1", "--plot", str(tmp_path / "throughput.png")]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(report["tokens_per_second"])[:2] == ["plain", "ours"]
    assert (tmp_path / "throughput.png").read_bytes().startswith(PNG)
