"""The launcher: four real processes of JAX on the CPU train, one is killed, all are stopped, the next start resumes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maxtext_moe_te import errors
from maxtext_moe_te.settings import limits
from maxtext_moe_te.settings.rank import VARIABLE, Rank
from maxtext_moe_te.tools import launch
from tests.processes import finish, wait_for

# What the launcher sees of MaxText's trainer: steps that need all ranks, checkpoints, resuming, and a stop that all agree on.
TRAINER = """
import json, pathlib, signal, sys, threading, time

from maxtext_moe_te.host import watchdog

folder, steps, manner = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if manner == "refuses":
  from maxtext_moe_te.errors import RefusedError
  raise RefusedError(found="a", needed="b", fix="c")
if manner == "deaf":
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  print("completed step: 2 ", flush=True)
  time.sleep(60)

import jax, jax.numpy as jnp
from jax.experimental import multihost_utils

mesh = jax.sharding.Mesh(jax.devices(), "rank")
rank = jax.process_index()
print("rank", rank, "of", jax.process_count(), "with", jax.local_device_count(), "device", flush=True)
x = jax.make_array_from_callback((jax.process_count(),), jax.NamedSharding(mesh, jax.P("rank")), lambda _: jnp.ones(1) * (rank + 1))
step = jax.jit(lambda w, x: w - 0.1 * (w - x.mean()), out_shardings=jax.NamedSharding(mesh, jax.P()))
checkpoint = folder / "checkpoint.json"
start, w = json.loads(checkpoint.read_text()) if checkpoint.exists() else (0, 0.0)
print("starts at step", start, flush=True)
save = lambda step, w: rank == 0 and checkpoint.write_text(json.dumps([step, float(w)]))
for number in range(start, steps):
  time.sleep(0.1)
  w = step(w, x)
  print("completed step:", number, float(w), flush=True)
  stop = multihost_utils.reached_preemption_sync_point(number)
  if number % 5 == 4 or stop:
    save(number + 1, w)
  if manner == f"rank {rank} fails at {number}":
    raise RuntimeError("the reason")
  if watchdog._current:
    watchdog._current.beat(number)
  if manner == f"rank {rank} hangs at {number}":
    threading.Event().wait()
  if stop:
    break
"""


# The product's entry, whose `activate` would import MaxText. Only the trainer that trains needs JAX.
ENTRY = """
import sys
from maxtext_moe_te import cli, session
session.activate = lambda **kwargs: None
if sys.argv[1] == "doctor":
  print("asked with", *sys.argv[2:], flush=True)
  sys.exit(1)
session.entries.has_train_loop = lambda module: True
if sys.argv[-1] in ("refuses", "deaf"):
  session.join = lambda rank: None
sys.exit(cli.main())
"""
LAUNCH = """
import sys
from maxtext_moe_te import cli
from maxtext_moe_te.tools import launch
launch.ENTRY = (sys.executable, sys.argv.pop(1))
sys.exit(cli.main(["launch", *sys.argv[1:]]))
"""


@pytest.fixture
def start(tmp_path):
  """Starts `launch` with the script in the place of MaxText's trainer."""
  for name, text in (("trainer", TRAINER), ("entry", ENTRY), ("launch_script", LAUNCH)):
    (tmp_path / f"{name}.py").write_text(text)
  environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # the tests' own: eight devices
  environment |= {"PYTHONPATH": f"{tmp_path}:{Path(launch.__file__).parents[2]}", "JAX_PLATFORMS": "cpu"}
  started = []

  def begin(*options, steps=100000, manner="", nproc=4):
    command = [sys.executable, str(tmp_path / "launch_script.py"), str(tmp_path / "entry.py"), "--nproc", str(nproc)]
    command += ["--logs", str(tmp_path / "logs"), *options, "run", "trainer", str(tmp_path), str(steps), manner]
    started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0))
    return started[-1]

  yield begin
  for process in started:
    process.kill()
    process.communicate()


def ranks_of(process):
  """Process ids of a launcher's ranks, by rank."""
  found = {}
  for path in Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError, ValueError):
      parent = int(re.search(r"PPid:\t(\d+)", (path / "status").read_text())[1])
      variable = re.search(rb"MAXTEXT_MOE_TE_RANK=\S+ \d+ (\d+) \d+", (path / "environ").read_bytes())
      if parent == process.pid and variable:
        found[int(variable[1])] = int(path.name)
  return found


def alive(pid):
  try:
    return "Z" not in re.search(r"State:\t(\w)", Path(f"/proc/{pid}/status").read_text())[1]
  except OSError:
    return False


def test_four_ranks_one_killed_named_and_resumed(start, tmp_path):
  process = start("--no-doctor")
  wait_for(process, "completed step: 6 ")
  ranks = ranks_of(process)
  assert sorted(ranks) == [0, 1, 2, 3]
  began = time.monotonic()
  os.kill(ranks[2], signal.SIGKILL)
  status, _, err = finish(process)
  assert time.monotonic() - began < 30
  assert status == 128 + signal.SIGKILL
  assert "rank 2 was killed by SIGKILL; stopping the other 3 of this host" in err
  assert re.search(rf"launch: \S+ the first to fail was rank 2, which was killed by SIGKILL; its log: {tmp_path}/logs/rank-0002.log", err)
  assert not any(map(alive, ranks.values()))
  logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
  assert sorted(name for name in logs if name.endswith(".log")) == [f"rank-{rank:04d}.log" for rank in range(4)]
  for rank in range(4):
    assert f"rank {rank} of 4 with 1 device" in logs[f"rank-{rank:04d}.log"]

  status, out, err = finish(start("--no-doctor", steps=40))
  assert status == 0, err
  resumed = int(re.search(r"starts at step (\d+)", out)[1])
  assert 5 <= resumed < 40 and "completed step: 39 " in out
  assert float(re.search(r"completed step: 39 (\S+)", out)[1]) == pytest.approx(2.5 * (1 - 0.9**40))  # 2.5: mean of all ranks' data
  assert "starts at step 0" in (tmp_path / "logs" / "rank-0001.log").read_text(), "the log of the first start is gone"


def test_stopped_together_at_a_step_that_is_saved(start, tmp_path):
  process = start("--no-doctor", nproc=2)
  wait_for(process, "completed step: 6 ")
  ranks = ranks_of(process)
  process.send_signal(signal.SIGTERM)
  status, _, err = finish(process)
  assert status == 128 + signal.SIGTERM
  assert "launch: stopping: up to 120 s for a checkpoint; once more to end at once" in err
  assert err.endswith("launch: stopped; the same command resumes from the newest checkpoint, if there is one\n")
  assert not any(map(alive, ranks.values()))
  last = [re.findall(r"completed step: (\d+)", (tmp_path / "logs" / f"rank-{rank:04d}.log").read_text())[-1] for rank in range(2)]
  assert len(set(last)) == 1
  assert json.loads((tmp_path / "checkpoint.json").read_text())[0] == int(last[0]) + 1


@pytest.mark.parametrize("second", [True, False], ids=["second-signal", "grace-over"])
def test_ranks_that_do_not_stop_are_killed(start, second):
  process = start("--no-doctor", "--grace", "60" if second else "2", manner="deaf", nproc=1)
  wait_for(process, "completed step: 2 ")
  process.send_signal(signal.SIGINT)
  time.sleep(1)
  assert process.poll() is None
  if second:
    process.send_signal(signal.SIGINT)
  began = time.monotonic()
  assert finish(process)[0] == 128 + signal.SIGINT
  assert time.monotonic() - began < 15


def test_a_rank_that_raises_is_named_with_its_reason(start):
  status, _, err = finish(start("--no-doctor", manner="rank 1 fails at 3", nproc=2))
  assert status == 1
  assert "  RuntimeError: the reason\n" in err and "the first to fail was rank 1, which ended with status 1" in err


def test_a_rank_that_hangs_ends_the_run_and_all_say_where_they_wait(start, tmp_path):
  began = time.monotonic()
  status, _, err = finish(start("--no-doctor", "--step-limit", "4", manner="rank 1 hangs at 3", nproc=2))
  assert status == limits.EXCEEDED and time.monotonic() - began < 60
  assert re.search(
    r"maxtext-moe-te: error: rank [01]: after step [34] was issued, no other had been for [45] s \(limit 4 s\); needed: ", err
  )
  stacks = [(tmp_path / "logs" / f"rank-000{rank}.stacks").read_text() for rank in (0, 1)]
  waits = [int(re.search(r'trainer\.py", line (\d+) in <module>', text)[1]) for text in stacks]
  hangs = next(number for number, line in enumerate(TRAINER.splitlines(), 1) if "Event().wait()" in line)
  assert waits[1] == hangs and waits[0] != hangs, "the other one waits for it elsewhere"


def test_a_first_step_that_does_not_come(start):
  status, _, err = finish(start("--no-doctor", "--first-step-limit", "3", manner="rank 0 hangs at -1", steps=0, nproc=1))
  assert status == 0, "a run that ended in time"
  status, _, err = finish(start("--no-doctor", "--first-step-limit", "2", manner="deaf", nproc=1))
  assert status == limits.EXCEEDED and "rank 0: no step had been issued for " in err and "larger --first-step-limit" in err


def test_a_refusal_is_one_line(start):
  status, _, err = finish(start("--no-doctor", manner="refuses", nproc=2))
  assert status == 2
  assert [line for line in err.splitlines() if line.startswith("  ")] == ["  maxtext-moe-te: error: a; needed: b. Fix: c."]


def test_the_doctor_comes_first(start, tmp_path):
  status, out, err = finish(start(nproc=2, manner="plain"))
  assert status == 1
  assert out == f"asked with --nodes 1 --gpus-per-node 2 --processes-per-node 2 {tmp_path} 100000 plain\n"
  assert err == "launch: doctor found what would stop this run; --no-doctor starts it all the same\n"
  assert not (tmp_path / "logs").exists()
  assert finish(start("--ranks-per-gpu", "2", nproc=2))[1] == "asked with\n"


def test_ranks_do_not_outlive_a_killed_launcher(start):
  process = start("--no-doctor", nproc=1)
  wait_for(process, "completed step: 2 ")
  ranks = ranks_of(process)
  assert len(ranks) == 1 and all(map(alive, ranks.values()))
  process.kill()
  deadline = time.monotonic() + 10
  while any(map(alive, ranks.values())) and time.monotonic() < deadline:
    time.sleep(0.1)
  assert not any(map(alive, ranks.values()))


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--nproc", "0"], "write --nproc with the number of GPUs of this host"),
    (["--nproc", "3", "--ranks-per-gpu", "2"], "make --nproc a multiple of --ranks-per-gpu"),
    (["--nproc", "2", "--nnodes", "2"], "add --coordinator HOST0:PORT"),
    (["--nproc", "2", "--nnodes", "2", "--node-rank", "2"], "give each host its own number"),
    (["--nproc", "2", "--nnodes", "0"], "leave --nnodes out"),
    (["--nproc", "2", "--coordinator", "host"], "write the name of host 0 and a free port of it"),
    (["--nproc", "2", "--coordinator", ":3400"], "write the name of host 0 and a free port of it"),
    (["--nproc", "2", "--coordinator", "host:99999"], "write the name of host 0 and a free port of it"),
    (["--nproc", "2", "--grace", "nan"], "--grace nan; needed: seconds, 0 or more. Fix: write --grace 120"),
    (["--nproc", "2", "--grace", "-1"], "--grace -1; needed: seconds, 0 or more."),
    (["--nproc", "2", "--no-doctor", "--logs", "/dev/null/logs"], "give another --logs"),
  ],
)
def test_bad_arguments(arguments, message):
  with pytest.raises(errors.OptionError, match=re.escape(message)):
    launch.main([*arguments, "train", "base.yml"])


def environments(monkeypatch, tmp_path, arguments):
  """What each rank would be started with."""
  seen = []
  popen = subprocess.Popen
  monkeypatch.setattr(launch.subprocess, "Popen", lambda command, env=None, **kwargs: seen.append(env) or popen(["true"], **kwargs))
  assert launch.main([*arguments, "--no-doctor", "--logs", str(tmp_path), "train", "base.yml"]) == 0
  return seen


def test_two_ranks_on_one_gpu(monkeypatch, tmp_path):
  monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
  for environment in environments(monkeypatch, tmp_path, ["--nproc", "4", "--ranks-per-gpu", "2"]):
    assert environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.35"


def test_places_of_the_second_host(monkeypatch, tmp_path):
  arguments = ["--nproc", "4", "--ranks-per-gpu", "2", "--nnodes", "2", "--node-rank", "1", "--coordinator", "host0:3400"]
  places = []
  for environment in environments(monkeypatch, tmp_path, arguments):
    monkeypatch.setenv(VARIABLE, environment[VARIABLE])
    places.append(Rank.of_this_process())
  assert places == [Rank("host0:3400", 8, number, device) for number, device in ((4, 0), (5, 0), (6, 1), (7, 1))]


@pytest.mark.parametrize("text", ["x", "host:1 2", "host:1 2 x 0", "host:1 2 2 0", "host 2 0 0", "host:1 2 -1 0"])
def test_a_rank_that_launch_did_not_make(monkeypatch, text):
  monkeypatch.setenv(VARIABLE, text)
  with pytest.raises(errors.OptionError, match=f"{VARIABLE}={text}; needed: what launch sets .* Fix: unset {VARIABLE}"):
    Rank.of_this_process()


def test_without_launch_a_process_is_no_rank(monkeypatch):
  monkeypatch.delenv(VARIABLE, raising=False)
  assert Rank.of_this_process() is None
