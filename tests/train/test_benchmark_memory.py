from train.benchmark_memory import _in_own_process, build, plain_loss
from train.objective import depth_weights, objective_inputs
from train.teacher import teach


def test_the_plain_way_is_the_same_loss():
    objective, rows = build(256, 2, 128, 16, "cpu")
    teacher = teach(objective.stack.target, rows, target_hidden="post_norm", chunk_rows=16)
    scales = rows.supervised(2).float().reciprocal()
    scales *= scales.new_tensor(depth_weights(0.6, 2))
    loss, _ = objective(*objective_inputs(rows, teacher), scales)
    assert abs(loss.item() - plain_loss(objective, rows).item()) < 1e-4


def test_head_and_loss_do_not_grow_with_rows():
    def cost(way, rows):
        case = (rows, 2, 16384)
        return _in_own_process(way, case, 64, "cpu") - _in_own_process("modules", case, 64, "cpu")

    chunked, more_rows = cost("chunked", 512), cost("chunked", 2048)
    assert more_rows < 1.5 * chunked + 10  # MiB; four times the logits
    assert cost("plain", 512) > 4 * more_rows
