"""turboquant-generate on real files: plain models, the predecessor's, and processes of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import mlx_lm
import pytest

from processes import end_of, listen_to_ctrl_c
from turboquant_mlx import convert

PEER = Path(__file__).parents[1] / "fixtures" / "predecessor"
PROMPT = "why does ice float?"
GREEDY = ("--prompt", PROMPT, "--temp", "0", "--max-tokens", "12", "--min-tokens", "12")


def command_line(model, *options):
    return [sys.executable, "-m", "turboquant_mlx.generate", "--model", str(model), *options]


def start(model, *options, **streams):
    """The command as a process that Ctrl-C reaches even if our own parent ignores it."""
    return subprocess.Popen(command_line(model, *options), preexec_fn=listen_to_ctrl_c, **streams)


def answer_ids(model, count):
    """The first tokens that stock mlx-lm generates greedily, end tokens like any other."""
    model, tokenizer = mlx_lm.load(str(model))
    tokenizer.eos_token_ids = []
    messages = [{"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return [r.token for r in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=count)]


def test_a_plain_model_answers_as_with_stock_mlx_lm(run, source):
    model, tokenizer = mlx_lm.load(str(source))
    messages = [{"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    tokenizer.eos_token_ids = []
    expected = mlx_lm.generate(model, tokenizer, prompt, max_tokens=12)

    result = run("--model", str(source), *GREEDY)
    assert result.code == 0
    assert result.out == expected + "\n"
    assert f"prompt: {len(prompt)} tokens" in result.err
    assert result.notes == []


def test_defaults_of_the_folder_apply_to_it(run, source):
    result = run("--model", str(source), "--prompt", PROMPT, "--max-tokens", "2")
    assert "sampling: temp 0.7, top-p 0.95, top-k 20\n" in result.err


def test_end_tokens_of_the_folder_apply_to_it(run, source, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    # The token that this random model writes sixth becomes one that ends its answers.
    ids = answer_ids(source, 6)
    config = json.loads((folder / "generation_config.json").read_text())
    config["eos_token_id"] = [*config["eos_token_id"], ids[5]]
    (folder / "generation_config.json").write_text(json.dumps(config))
    result = run("--model", str(folder), "--prompt", PROMPT, "--temp", "0")
    length = ids.index(ids[5]) + 1
    assert f"generated: {length} token" in result.err
    assert "(ended by the model)" in result.err


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    """The tiny llama in our own format, at 2 bits so that its QJL sketches have much to correct."""
    folder = tmp_path_factory.mktemp("converted") / "llama-2bit"
    convert(str(source), str(folder), bits=2, use_qjl=True)
    return folder


def test_a_folder_of_ours_answers(run, converted):
    result = run("--model", str(converted), *GREEDY)
    assert result.code == 0
    assert "generated: 12 tokens" in result.err
    assert result.notes == []


def test_fast_changes_what_a_folder_of_ours_computes(run, converted):
    whole, fast = (run("--model", str(converted), *GREEDY, *more) for more in ([], ["--fast"]))
    assert (whole.code, fast.code) == (0, 0)
    assert whole.out != fast.out
    assert fast.notes == []


@pytest.mark.parametrize("name", ["dense-3bit-g64", "moe-ternary-down4"])
def test_a_folder_of_the_predecessor_answers(run, name):
    result = run("--model", str(PEER / name), *GREEDY)
    assert result.code == 0
    assert "generated: 12 tokens" in result.err


def test_fast_changes_what_a_model_with_qjl_computes(run):
    model = str(PEER / "dense-4bit-g128-qjl")
    whole, fast = (run("--model", model, *GREEDY, *more) for more in ([], ["--fast"]))
    assert (whole.code, fast.code) == (0, 0)
    assert whole.out != fast.out
    assert fast.notes == []


def test_fast_and_cpu_expand_on_a_model_without_are_noted(run, source):
    result = run("--model", str(source), *GREEDY, "--fast", "--cpu-expand", "never")
    assert result.code == 0
    assert len(result.notes) == 2


@pytest.mark.parametrize("choice", ["auto", "always", "never"])
def test_cpu_expand_changes_speed_and_not_the_answer(run, choice):
    model = str(PEER / "dense-3bit-g64")
    result = run("--model", model, *GREEDY, "--cpu-expand", choice)
    assert result.code == 0
    assert result.out == run("--model", model, *GREEDY).out


def test_a_missing_folder_is_called_so(run, tmp_path):
    result = run("--model", str(tmp_path / "nothing"), "--prompt", PROMPT)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: no such folder")


def test_a_folder_that_is_no_model_is_an_error(run, tmp_path):
    result = run("--model", str(tmp_path), "--prompt", PROMPT)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")


def test_a_model_without_tokenizer_is_an_error(run, source, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    result = run("--model", str(folder), "--prompt", PROMPT)
    assert (result.code, result.out) == (2, "")
    assert "tokenizer" in result.err.splitlines()[0]


def test_a_damaged_generation_config_is_named(run, source, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    (folder / "generation_config.json").write_text("{")
    result = run("--model", str(folder), "--prompt", PROMPT)
    assert (result.code, result.out) == (2, "")
    assert "generation_config.json" in result.err


def test_a_process_reads_its_prompt_from_a_pipe(run, source):
    done = subprocess.run(
        command_line(source, *GREEDY[2:]), input=PROMPT + "\n", capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout == run("--model", str(source), *GREEDY).out
    assert "peak memory" in done.stderr


def test_ctrl_c_ends_a_process_with_130(source):
    process = start(
        source,
        *("--prompt", PROMPT, "--max-tokens", "1000000", "--min-tokens", "1000000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    code, err = end_of(process)
    assert code == 130
    assert b"(interrupted)" in err
    assert err.endswith(b"interrupted\n")
    assert b"Traceback" not in err


def test_a_reader_that_goes_away_ends_a_process_quietly(source):
    process = start(
        source,
        *("--prompt", PROMPT, "--max-tokens", "1000000", "--min-tokens", "1000000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=30) == 128 + signal.SIGPIPE
    assert b"Traceback" not in err


def test_no_prompt_on_a_terminal_is_answered_at_once(source):
    controller, terminal = os.openpty()
    try:
        done = subprocess.run(
            command_line(source), stdin=terminal, capture_output=True, text=True, timeout=30
        )
    finally:
        os.close(controller)
        os.close(terminal)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no prompt given\nhint: ")
