"""`mtp-infer` as a user runs it: outputs, exit statuses, and one-line errors for what a user can fix."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

import infer
import mtp
import train
from infer.cli import main
from tests.builders import make_target
from tests.infer.conftest import save_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def run(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return status, captured.out, captured.err


def refused(capsys, *arguments):
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert err.startswith("error: ")
    return err


def test_generate_is_the_same_text_for_any_number_of_drafts_and_batch(
    capsys, checkpoint_folder, target_folder, tmp_path
):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "hello there"}\nplain text\n{"prompt_ids": [7]}\n{"messages": [{"role": "user", "content": "x"}]}\n'
    )
    texts = set()
    for options in (
        ["--target", target_folder],
        ["--checkpoint", checkpoint_folder, "--drafts", 0],
        ["--checkpoint", checkpoint_folder, "--drafts", 2, "--batch-size", 3],
        ["--checkpoint", checkpoint_folder],
        ["--checkpoint", checkpoint_folder, "--uncorrected"],
    ):
        status, out, err = run(capsys, "generate", *options, "--prompts", prompts, "--max-new-tokens", 20, "--json")
        assert status == 0
        records = [json.loads(line) for line in out.splitlines()]
        assert [record["index"] for record in records] == [0, 1, 2, 3]
        texts.add(json.dumps([[record["token_ids"], record["finish_reason"]] for record in records]))
    assert len(texts) == 1
    assert "acceptance length" in err


def test_generate_reads_standard_input(capsys, monkeypatch, target_folder):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\n\n\xff\xfe\ntwo\n")))
    status, out, err = run(capsys, "generate", "--target", target_folder, "--max-new-tokens", 4, "--json")
    assert status == 0
    assert len(out.splitlines()) == 2
    assert "standard input:3: not UTF-8" in err


def test_check_passes_and_finds_a_planted_fault(capsys, checkpoint_folder, tmp_path):
    figures = tmp_path / "check.json"
    options = [
        "check",
        "--checkpoint",
        checkpoint_folder,
        "--prompt",
        "abc",
        "--prompt",
        "hello",
        "--max-new-tokens",
        16,
    ]
    status, out, _ = run(capsys, *options, "--rounds", 50, "--output", figures)
    assert status == 0
    assert "check passed" in out
    forced = json.loads(figures.read_text())["forced accept patterns"]
    assert forced["rounds"] >= 50
    assert forced["mismatches"] == 0
    status, out, _ = run(capsys, *options, "--uncorrected", "--rounds", 50)
    assert status == 1
    assert "FAILED" in out
    assert "first mismatch: prompt" in out


def test_check_in_float64(capsys, checkpoint_folder):
    status, out, _ = run(
        capsys, "check", "--checkpoint", checkpoint_folder, "--prompt", "abc", "--dtype", "float64", "--rounds", 20
    )
    assert status == 0
    assert "noise 1e-10" in out


def test_check_refuses_a_dtype_whose_rounding_hides_faults(capsys, checkpoint_folder):
    assert "float32 or float64" in refused(
        capsys, "check", "--checkpoint", checkpoint_folder, "--prompt", "abc", "--dtype", "bfloat16"
    )


def test_compare_gives_one_table(capsys, checkpoint_folder, tmp_path):
    figures = tmp_path / "compare.json"
    status, out, _ = run(
        capsys, "compare", "--checkpoint", checkpoint_folder, "--prompt", "abc", "--prompt", "de", "--all-drafts",
        "--transformers", "--max-new-tokens", 12, "--output", figures,
    )  # fmt: skip
    assert status == 0
    names = [row["name"] for row in json.loads(figures.read_text())["rows"]]
    assert names == [
        "plain", "transformers generate", "corrected, 1 drafts", "corrected, 2 drafts", "corrected, 3 drafts",
        "uncorrected, 3 drafts",
    ]  # fmt: skip
    assert out.count("2 of 2") == len(names)


def test_distill_resumes_and_drops_a_half_written_line(capsys, target_folder, tmp_path):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"id": n, "prompt": f"prompt {n}"}) + "\n" for n in range(7)))
    options = ["distill", "--target", target_folder, "--prompts", prompts, "--output", output, "--max-new-tokens", 9]
    assert run(capsys, *options, "--batch-size", 3)[0] == 0
    whole = {record["distill_id"]: record for record in map(json.loads, output.read_text().splitlines())}
    assert len(whole) == 7
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:4]) + lines[4][:20])  # killed while writing line 5
    status, _, err = run(capsys, *options)
    assert status == 0
    assert "4 answers are there already" in err
    again = {record["distill_id"]: record for record in map(json.loads, output.read_text().splitlines())}
    assert again == whole
    for record in whole.values():
        assert record["messages"][-1]["role"] == "assistant"
        assert record["id"] in range(7)
        assert 1 <= len(record["response_ids"]) <= 9


def test_distill_keeps_odd_characters_and_resumes_after_them(capsys, target_folder, tmp_path):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "a\u2028b\u0085c", "note": "\\ud800"}\n', encoding="utf-8")
    options = ["distill", "--target", target_folder, "--prompts", prompts, "--output", output, "--max-new-tokens", 3]
    assert run(capsys, *options)[0] == 0
    assert json.loads(output.read_bytes())["note"] == "\ud800"
    status, _, err = run(capsys, *options)
    assert status == 0
    assert "1 answers are there already" in err


def test_prompts_are_read_as_training_reads_them(capsys, target_folder, tmp_path):
    """One record in several shapes: the same tokens; what distill writes trains on exactly those."""
    plain = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}]}
    shapes = [
        plain,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"conversations": [{"from": "human", "value": "ab"}]},
        {"prompt": "ab"},
        {"prompt": [{"role": "user", "content": "ab"}]},
    ]
    lines = [shapes[0], *({**shape, "system": "s"} for shape in shapes[1:])]
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, out, _ = run(
        capsys, "generate", "--target", target_folder, "--prompts", prompts, "--max-new-tokens", 5, "--json"
    )
    assert status == 0
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["line"] for answer in answers] == [1, 2, 3, 4, 5]
    assert len({str(answer["token_ids"]) for answer in answers}) == 1
    assert run(capsys, "distill", "--target", target_folder, "--prompts", prompts, "--output", output)[0] == 0
    (record,) = map(json.loads, output.read_text().splitlines())  # equal prompts are answered once
    assert record["messages"][:2] == plain["messages"]
    assert "system" not in record


def test_distill_refuses_an_output_made_with_other_settings(capsys, target_folder, tmp_path):
    output = tmp_path / "answers.jsonl"
    options = ["distill", "--target", target_folder, "--prompt", "a", "--output", output]
    assert run(capsys, *options, "--max-new-tokens", 5)[0] == 0
    assert "max_new_tokens" in refused(capsys, *options, "--max-new-tokens", 6)


def test_broken_prompt_lines_are_skipped_counted_and_named(capsys, target_folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '\ufeff{"prompt": "good"}\n{"prompt": \n{"question": "?"}\n{"prompt": ""}\n{"prompt_ids": ["a"]}\n'
        '{"prompt": "\\ud800"}\n{"prompt_ids": [999]}\n' + json.dumps({"prompt": "long" * 99})
        + "\n" + '{"a":' * 20000 + "\n"
        '{"messages": [{"role": "user", "content": "good \u4f60\u597d, one line\u2028 still"}]}\n', encoding="utf-8",
    )  # fmt: skip
    status, out, err = run(
        capsys, "generate", "--target", target_folder, "--prompts", prompts, "--max-new-tokens", 3, "--json"
    )
    assert status == 0
    assert len(out.splitlines()) == 2
    assert "skipped 8 broken line(s)" in err
    assert f"{prompts}:2: broken JSON" in err
    assert f"{prompts}:3: none of the fields" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x"], "--target"),
        (["--target", "/no/such/folder", "--prompt", "x"], "no such folder"),
        (["--target", "TARGET", "--prompt", ""], "empty prompt"),
        (["--target", "TARGET", "--prompt", "x" * 200], "context of 128"),
        (["--target", "TARGET", "--prompts", "/no/such/file"], "cannot be read"),
        (["--target", "TARGET", "--prompt", "x", "--drafts", "2"], "without --checkpoint"),
        (["--checkpoint", "CHECKPOINT", "--prompt", "x", "--drafts", "4"], "3 trained modules"),
        (["--checkpoint", "/no/such/run", "--prompt", "x"], "no such checkpoint"),
        (["--target", "TARGET", "--prompt", "x", "--device", "cuda:99"], "device 'cuda:99'"),
    ],
)
def test_what_a_user_can_fix_is_one_line(capsys, target_folder, checkpoint_folder, arguments, message):
    names = {"TARGET": target_folder, "CHECKPOINT": checkpoint_folder}
    assert message in refused(capsys, "generate", *[names.get(argument, argument) for argument in arguments])


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        ("generate", "--max-new-tokens", "0"),
        ("generate", "--batch-size", "0"),
        ("generate", "--eos", "-5"),
        ("generate", "--drafts", "-1"),
        ("check", "--rounds", "0"),
        ("compare", "--limit", "0"),
        ("compare", "--limit", "many"),
        ("distill", "--max-minutes", "nan"),
    ],
)
def test_a_number_out_of_range_is_refused_with_its_flag(capsys, command, flag, value):
    with pytest.raises(SystemExit) as stopped:
        main([command, flag, value])
    assert stopped.value.code == 2
    assert f"argument {flag}: {value!r}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "compare"])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(capsys, checkpoint_folder, tmp_path, command):
    options = [command, "--checkpoint", checkpoint_folder, "--prompt", "x", "--max-new-tokens", 3]
    assert "cannot be written" in refused(capsys, *options, "--output", tmp_path)
    assert run(capsys, *options, "--output", tmp_path / "new" / "folder" / "x.json")[0] == 0


def damaged(folder, fault):
    """Returns the folder after one thing that happens to folders of models."""
    if fault == "a truncated file":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-50])
    elif fault == "broken JSON":
        (folder / "config.json").write_text('{"a"')
    elif fault in ("a missing tensor", "a missing head"):
        weights = safetensors.torch.load_file(folder / "model.safetensors")
        del weights["lm_head.weight" if "head" in fault else "model.layers.1.mlp.down_proj.weight"]
        safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    elif fault == "a layer too many":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    elif fault == "a strange end token":
        config = json.loads((folder / "generation_config.json").read_text())
        (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [[2]]}))
    elif fault == "no weights":
        (folder / "model.safetensors").unlink()
    elif fault == "another width":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    elif fault == "remote code":
        config = json.loads((folder / "config.json").read_text())
        more = {"model_type": "unheard-of", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
        (folder / "config.json").write_text(json.dumps(config | more))
        (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    elif fault == "a broken template":
        (folder / "chat_template.jinja").write_text("{% for x in %}")
    return folder


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("a truncated file", "could not be loaded"),
        ("broken JSON", "config.json"),
        ("no weights", "model.safetensors"),
        ("another width", "its config.json makes it"),
        ("remote code", "custom code"),
        ("a broken template", "template"),
        ("a missing tensor", "'model.layers.1.mlp.down_proj.weight' is missing"),
        ("a missing head", "'lm_head.weight' is missing"),
        ("a layer too many", "'model.layers.3"),
        ("a strange end token", "eos_token_id"),
    ],
)
def test_a_damaged_target_is_one_line(capsys, target_folder, tmp_path, fault, said):
    folder = damaged(shutil.copytree(target_folder, tmp_path / "target"), fault)
    assert said in refused(capsys, "generate", "--target", folder, "--prompt", "x")
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("field", ["name", "hidden_size", "fingerprint"])
def test_damaged_provenance_is_named(capsys, checkpoint_folder, tmp_path, field):
    folder = shutil.copytree(checkpoint_folder, tmp_path / "run")
    provenance = json.loads((folder / "provenance.json").read_text())
    del provenance["target"][field]
    (folder / "provenance.json").write_text(json.dumps(provenance))
    assert f"target.{field}" in refused(capsys, "generate", "--checkpoint", folder, "--prompt", "x")
    (folder / "provenance.json").write_text('{"target": []}')
    assert "field 'target'" in refused(capsys, "generate", "--checkpoint", folder, "--prompt", "x")


def test_broken_checkpoints_are_refused_with_the_tensor_named(capsys, checkpoint_folder, tmp_path):
    weights = safetensors.torch.load_file(checkpoint_folder / "modules.safetensors")
    name = "layers.1.eh_proj.weight"
    faults = {
        "missing": {key: value for key, value in weights.items() if key != name},
        "not part": weights | {"layers.9.extra": torch.zeros(1)},
        "has shape": weights | {name: weights[name][:, :5].contiguous()},
        "finite": weights | {name: weights[name] * float("nan")},
    }
    for message, tensors in faults.items():
        folder = tmp_path / message.replace(" ", "-")
        shutil.copytree(checkpoint_folder, folder)
        safetensors.torch.save_file(tensors, folder / "modules.safetensors")
        err = refused(capsys, "generate", "--checkpoint", folder, "--prompt", "x")
        assert message in err
        assert ("layers.9.extra" if message == "not part" else name) in err


def test_a_checkpoint_for_another_target_is_refused(capsys, checkpoint_folder, tmp_path):
    make_target("llama", vocab_size=99, seed=1).model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    err = refused(capsys, "generate", "--checkpoint", checkpoint_folder, "--target", tmp_path, "--prompt", "x")
    assert "other weights" in err


def test_a_prompt_of_one_token(capsys, checkpoint_folder):
    status, out, _ = run(
        capsys, "generate", "--checkpoint", checkpoint_folder, "--raw", "--prompt", "a", "--max-new-tokens", 5, "--json"
    )
    assert status == 0
    assert json.loads(out)["finish_reason"] in ("stop", "length")


def test_a_contract_that_is_no_contract_is_named(capsys, checkpoint_folder, tmp_path):
    folder = shutil.copytree(checkpoint_folder, tmp_path / "run")
    contract = json.loads((folder / "contract.json").read_text())
    for content in (
        json.dumps(contract | {"draft_vocab": 5}),
        json.dumps(contract | {"num_modules": 10**6, "draft_steps": 10**6}),
        "[" * 100000,
    ):
        (folder / "contract.json").write_text(content)
        assert str(folder) in refused(capsys, "generate", "--checkpoint", folder, "--prompt", "x")


def test_a_check_that_drafted_nothing_does_not_pass(capsys, checkpoint_folder):
    err = refused(capsys, "check", "--checkpoint", checkpoint_folder, "--prompt", "abc", "--max-new-tokens", 1)
    assert "--max-new-tokens" in err


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [("| head -c 5", 1, ""), ("> /dev/full", 2, "error: standard output: No space left on device")],
)
def test_a_standard_output_that_ends_is_no_traceback(target_folder, end, status, said):
    prompts = "".join(f"--prompt 'prompt {n}' " for n in range(40))
    command = f"{sys.executable} -m infer generate --target {target_folder} --json --max-new-tokens 90 {prompts}"
    shell = f"set -o pipefail; {command} {end} >&3" if "|" in end else f"{command} {end}"
    done = subprocess.run(["bash", "-c", f"exec 3>/dev/null; {shell}"], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert said in done.stderr


def test_answers_are_printed_in_any_encoding(target_folder):
    command = [sys.executable, "-m", "infer", "generate", "--target", str(target_folder), "--prompt", "x"]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr


def test_the_imported_packages_are_ours():
    """`train` and `infer` are generic names: another package of that name must not win."""
    roots = {package.__path__[0].rsplit("/", 1)[0] for package in (mtp, train, infer)}
    assert len(roots) == 1
    assert (mtp.__path__[0].rsplit("/", 1)[0]) in __file__
