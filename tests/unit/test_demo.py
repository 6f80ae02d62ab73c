"""The demo around its training: the text, the folder, stopping and resuming, the report. A script plays the training."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from maxtext_moe_te import errors
from maxtext_moe_te.tools import demo
from tests.processes import finish, wait_for

ENTROPY = 6.0

# What the demo sees of MaxText's trainer: it resumes after its newest checkpoint, writes metrics, progress and checkpoints.
TRAINER = """
import json, pathlib, sys, time
folder, steps, manner = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if manner.startswith("fail"):
  print("Traceback", "the reason", sep="\\n", flush=True)
  sys.exit(int(manner[4:]))
checkpoints = folder / "demo" / "checkpoints"
checkpoints.mkdir(parents=True, exist_ok=True)
start = max((int(path.name) for path in checkpoints.iterdir()), default=-1) + 1
metrics = (folder / "metrics.jsonl").open("a")
try:
  for step in range(start, steps):
    time.sleep(60 if "waits" in manner and step == 6 else 0)
    row = {"step": float(step), "run_name": "demo", "learning/loss": 10 - step, "perf/per_device_tokens_per_sec": 100 + step,
           "moe_te/overflow": 0.0, "moe_te/load_max_over_mean": 1.5,
           "moe_te/load/expert_000": 0.75, "moe_te/load/expert_001": 0.25,
           "moe_te/rows_per_expert_max/layer_000": 12, "moe_te/rows_per_expert_max/layer_001": 13,
           "moe_te/rows_per_expert_mean/layer_000": 8, "moe_te/rows_per_expert_mean/layer_001": 8}
    print(json.dumps(row), file=metrics, flush=True)
    print(f"I1129 logger.py:1] completed step: {step}, loss: {10 - step}", flush=True)
    if step % 4 == 0 or step == steps - 1:
      (checkpoints / str(step)).mkdir()
except KeyboardInterrupt:
  while "deaf" in manner:
    time.sleep(1)
  print("the trainer's own farewell", flush=True)
  sys.exit(130)
"""


@pytest.fixture
def play(tmp_path):
  """Starts `demo ARGUMENTS` in a process of its own, with the script in the place of the training."""
  (tmp_path / "trainer.py").write_text(TRAINER)
  (tmp_path / "demo_with_script.py").write_text(
    textwrap.dedent(f"""
    import sys
    from maxtext_moe_te import cli
    from maxtext_moe_te.tools import demo
    manner = sys.argv.pop(1)
    demo.training_command = lambda folder, steps, words: [
      sys.executable, {str(tmp_path / "trainer.py")!r}, str(folder.root), str(steps), manner]
    demo.write_text = lambda path, say: {ENTROPY}
    sys.exit(cli.main(["demo", *sys.argv[1:]]))
    """)
  )

  def start(*arguments, manner="fast"):
    command = [sys.executable, str(tmp_path / "demo_with_script.py"), manner, *arguments, "--output", str(tmp_path / "out")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

  return start


def test_run_to_the_end(play, tmp_path):
  status, out, err = finish(play("--steps", "12"))
  assert (status, err) == (0, "")
  assert "completed step: 11" in out and "logger.py" not in out
  assert "loss         10.000 -> 1.500 nats/token (mean of the last 6 steps)" in out
  assert "the loss is below it" in out
  assert "speed        108 tokens/s (median)" in out
  assert "rows/expert  at most 13, mean 8, in the last step" in out
  assert "0 rows in 12 steps: no token was dropped" in out
  assert f"checkpoint   {tmp_path}/out/demo/checkpoints/11" in out
  assert (tmp_path / "out" / "train.log").read_text().count("completed step") == 12


def test_interrupted_resumed_and_finished(play, tmp_path):
  process = play("--steps", "12", manner="waits")
  wait_for(process, "completed step: 5")
  process.send_signal(signal.SIGINT)
  status, out, err = finish(process)
  assert (status, err) == (130, "")
  assert out == "stopped at step 5; the same command resumes after step 4\n"
  assert "farewell" in (tmp_path / "out" / "train.log").read_text()

  status, out, _ = finish(play("--steps", "12"))
  assert status == 0
  assert "resumes after step 4" in out and "completed step: 4," not in out
  assert "10.000 -> " in out  # steps from before the interruption are in the summary
  assert [row["step"] for row in demo.Folder(tmp_path / "out").steps()] == list(range(12))

  status, out, _ = finish(play("--steps", "12"))
  assert status == 0
  assert "finished after 12 steps" in out and "--fresh" in out and "10.000 -> " in out and "completed step" not in out

  status, out, _ = finish(play("--steps", "8", "--fresh"))
  assert status == 0
  assert "starts at step 0" in out and "0 rows in 8 steps" in out


def test_interrupted_before_the_first_step(play):
  process = play("--steps", "12", manner="waits")
  wait_for(process, "starts at step 0")
  process.send_signal(signal.SIGTERM)
  status, out, _ = finish(process)
  assert status == 128 + signal.SIGTERM
  assert "stopped" in out


def test_a_second_ctrl_c_kills(play):
  process = play("--steps", "12", manner="waits, deaf")
  wait_for(process, "completed step: 5")
  process.send_signal(signal.SIGINT)
  time.sleep(1)
  assert process.poll() is None
  process.send_signal(signal.SIGINT)
  status, out, _ = finish(process)
  assert status == 130
  assert "stopped at step 5" in out


@pytest.mark.parametrize(("manner", "status", "shown"), [("fail2", 2, ["the reason"]), ("fail1", 1, ["Traceback", "the reason"])])
def test_failed_training(play, tmp_path, manner, status, shown):
  found, out, _ = finish(play(manner=manner))
  assert found == status
  assert out.splitlines()[2:] == [*shown, f"training failed with status {status}; its log: {tmp_path}/out/train.log"]


def test_json(play, tmp_path):
  status, out, err = finish(play("--steps", "4", "--json"))
  summary = json.loads(out)
  assert status == 0
  assert "completed step: 3" in err
  assert summary["steps"] == 4 and summary["overflow"] == 0 and summary["unigram_entropy"] == ENTROPY
  assert not summary["learned"]
  assert summary["tokens_per_s"] is None


@pytest.mark.plot
def test_picture(play, tmp_path):
  assert finish(play("--steps", "4"))[0] == 0
  assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(play, tmp_path, monkeypatch):
  (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(name='matplotlib')")  # beside the started script
  status, out, _ = finish(play("--steps", "4"))
  assert status == 0
  assert "picture      not drawn: pip install matplotlib" in out


def test_one_demo_at_a_time(play):
  first = play("--steps", "12", manner="waits")
  wait_for(first, "completed step: 0")
  status, _, err = finish(play("--steps", "12"))
  assert status == 2
  assert "another demo is running" in err
  first.send_signal(signal.SIGINT)
  finish(first)


def test_other_configuration_is_refused(play):
  assert finish(play("--steps", "4"))[0] == 0
  for arguments in (["--steps", "5"], ["--steps", "4", "--plain"], ["--steps", "4", "moe_te.experts=reference"]):
    status, _, err = finish(play(*arguments))
    assert status == 2
    assert len(err.splitlines()) == 1 and "--fresh" in err


def test_a_damaged_folder_is_refused(play, tmp_path):
  assert finish(play("--steps", "4"))[0] == 0
  for path in (tmp_path / "out" / "metrics.jsonl", tmp_path / "out" / "demo.json"):
    path.write_text("{")
    status, _, err = finish(play("--steps", "4"))
    assert status == 2
    assert len(err.splitlines()) == 1 and "--fresh" in err
  assert finish(play("--steps", "4", "--fresh"))[0] == 0


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--steps", "0"], "a positive number"),
    (["--steps", "-3"], "a positive number"),
    (["steps=3"], "--steps N"),
    (["metrics_file=x"], "--output DIR"),
    (["faster"], "KEY=VALUE"),
    (["--output", "/dev/null/demo"], "cannot be used: Not a directory"),
    (["--output", "a,b"], "give another --output"),
  ],
)
def test_bad_input(arguments, message, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(errors.MoeTeError, match=re.escape(message)) as caught:
    demo.main(arguments)
  assert "\n" not in str(caught.value)
  assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_left_alone(tmp_path):
  (tmp_path / "thesis.tex").write_text("precious")
  for arguments in ([], ["--fresh"]):
    with pytest.raises(errors.OptionError, match="files that no demo wrote"):
      demo.main([*arguments, "--output", str(tmp_path)])
  assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_demo_without_a_checkpoint_gives_way(tmp_path):
  folder = demo.Folder(tmp_path)
  with folder.open({"words": ["moe_te.experts=x"]}, fresh=False):
    folder.log.write_text("refused")
  with folder.open({"words": []}, fresh=False):
    assert not folder.log.exists()
    (folder.run / "checkpoints" / "5").mkdir(parents=True)
  with pytest.raises(errors.OptionError, match="holds a demo with words"), folder.open({"words": ["steps"]}, fresh=False):
    pass


def test_metrics_of_a_repeated_step_and_of_a_cut_line(tmp_path):
  folder = demo.Folder(tmp_path)
  folder.metrics.write_text('{"step": 0.0, "x": 1}\n{"step": 1.0, "x": 2}\n{"step": 1.0, "x": 3}\n{"step": 2.0, "x"')
  assert folder.steps() == [{"step": 0.0, "x": 1}, {"step": 1.0, "x": 3}]


def test_incomplete_checkpoints_do_not_count(tmp_path):
  folder = demo.Folder(tmp_path)
  assert folder.checkpoint() is None
  for name in ("20", "5", "40.orbax-checkpoint-tmp"):
    (folder.run / "checkpoints" / name).mkdir(parents=True)
  assert folder.checkpoint() == 20


def test_documents_are_the_whole_text():
  from pydoc_data.topics import topics

  pieces = list(demo.documents())
  assert "\n\n".join(pieces) == "\n\n".join(text.strip() for _, text in sorted(topics.items()))
  assert all(pieces)
  assert len(pieces) > len(topics)


def test_unigram_entropy():
  assert demo.unigram_entropy([1, 2, 3, 4] * 5) == pytest.approx(math.log(4))
  assert demo.unigram_entropy([7] * 9) == 0


@pytest.mark.host
@pytest.mark.parametrize("text", ["short", "ü" * 200, "long " * 5000])
def test_example_is_what_maxtext_parses(text):
  from maxtext.input_pipeline.protos import example_pb2

  example = example_pb2.Example.FromString(demo.serialize_example(text))
  assert {name: list(feature.bytes_list.value) for name, feature in example.features.feature.items()} == {"text": [text.encode()]}


@pytest.mark.host
def test_text_is_written_once_for_grain(tmp_path, capsys):
  from array_record.python.array_record_module import ArrayRecordReader

  path = tmp_path / "text.array_record"
  entropy = demo.write_text(path, print)
  reader = ArrayRecordReader(str(path))
  assert reader.num_records() == len(list(demo.documents()))
  assert 5 < entropy < 7
  assert "PSF licence" in capsys.readouterr().out

  written = path.stat().st_mtime_ns
  assert demo.write_text(path, print) == entropy
  assert path.stat().st_mtime_ns == written
  assert [found.name for found in tmp_path.iterdir()] == [path.name]


@pytest.mark.host
@pytest.mark.slow
def test_real_training_stops_and_resumes_exactly(tmp_path):
  """Three starts of the real command: the steps trained twice have the same loss both times."""
  environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # the tests' own: eight devices
  command = [
    sys.executable, "-c", "import sys; from maxtext_moe_te.cli import main; sys.exit(main())",
    "demo", "--output", str(tmp_path / "out"), "--steps", "12", "checkpoint_period=3", "per_device_batch_size=2",
  ]  # fmt: skip
  process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  wait_for(process, "completed step: 4")
  process.send_signal(signal.SIGINT)
  status, out, err = finish(process)
  assert status == 130, err
  resumed = int(re.search(r"the same command resumes after step (\d+)", out)[1])  # how far it got depends on the machine
  assert resumed >= 3

  finished = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, timeout=300)
  assert finished.returncode == 0, finished.stderr
  summary = json.loads(finished.stdout)
  assert summary["overflow"] == 0
  assert summary["loss_end"] < summary["loss_start"]
  rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
  losses = {step: [row["learning/loss"] for row in rows if row["step"] == step] for step in range(12)}
  assert all(losses.values())
  twice = {step: both for step, both in losses.items() if len(both) == 2}
  assert all(step > resumed and both[0] == both[1] for step, both in twice.items()), (resumed, losses)
  assert twice or resumed >= 6, "a step after the checkpoint was trained and is not there twice"
