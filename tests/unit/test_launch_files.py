"""The files for Slurm and Kubernetes: read by the rules of those that will read them, and the Slurm script run with Slurm played."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from maxtext_moe_te.settings import overlay
from maxtext_moe_te.settings.words import split_words
from maxtext_moe_te.tools import launch

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "container" / "launch" / "slurm.sh"
JOBSET = ROOT / "container" / "launch" / "jobset.yml"

# Options of sbatch (its manual page) that the script uses, and what a value of each looks like; None for an option without one.
SBATCH = {
  "job-name": r"[\w.-]+",
  "nodes": r"\d+(-\d+)?",
  "ntasks-per-node": r"\d+",
  "gpus-per-node": r"(\w+:)?\d+",
  "exclusive": None,
  "mem": r"\d+[KMGT]?",
  "time": r"(\d+-)?\d+(:\d\d){0,2}",
  "signal": r"([RB]*:)?(\d+|[A-Z0-9]+)(@\d+)?",
  "requeue": None,
  "output": r"\S+",
  "open-mode": r"append|truncate",
}


def directives():
  """What sbatch reads of the script: the #SBATCH lines before the first command."""
  found = {}
  for line in SLURM.read_text().splitlines():
    if line and not line.startswith("#"):
      return found
    if line.startswith("#SBATCH"):
      name, equals, value = line.removeprefix("#SBATCH --").partition("=")
      assert name not in found, f"{name} twice"
      found[name] = value if equals else None
  return found


def test_sbatch_options():
  found = directives()
  assert len(found) == SLURM.read_text().count("#SBATCH "), "an #SBATCH line after the first command is not read"
  for name, value in found.items():
    assert name in SBATCH, f"sbatch has no option --{name}"
    assert value is None if SBATCH[name] is None else re.fullmatch(SBATCH[name], value), f"--{name}={value}"


def test_slurm_script_is_bash():
  assert subprocess.run(["bash", "-n", SLURM], capture_output=True, text=True).stderr == ""


def test_slurm_gives_the_launcher_less_time_than_it_has():
  notice_s = int(directives()["signal"].partition("@")[2])
  assert 0 < int(re.search(r"--grace (\d+)", SLURM.read_text())[1]) < notice_s


# Plays srun: writes down its own options, then runs the command of every node; and scontrol, and the launcher in the image.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
  echo "$1" >> "$RECORD/srun"
  case $1 in --output=*) output=${1#--output=} ;; esac
  shift
done
worst=0
for node in 0 1; do
  SLURM_NODEID=$node "$@" > "${output/\\%t/$node}" || { status=$?; (( status > worst )) && worst=$status; }
done
exit $worst
"""
SCONTROL = """#!/bin/bash
case $1 in
  show) printf 'host0\\nhost1\\n' ;;
  *) echo "$@" >> "$RECORD/scontrol" ;;
esac
"""
LAUNCHER = """#!/bin/bash
printf '%q ' "$@" >> "$RECORD/launch"; echo >> "$RECORD/launch"
echo "launch: 2026-01-01T00:00:0$((5 - SLURM_NODEID)).000+00:00 the first to fail was rank $SLURM_NODEID"
exit $STATUS
"""


@pytest.fixture
def slurm(tmp_path):
  """Runs the script as on the first of two nodes."""
  for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("maxtext-moe-te", LAUNCHER)):
    path = tmp_path / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)

  def run(*words, status=0, **more):
    variables = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "RECORD": str(tmp_path), "STATUS": str(status)}
    variables |= {"IMAGE": "registry#image:1", "OUTPUT": str(tmp_path / "out put"), "SLURM_JOB_NAME": "run", "SLURM_JOB_ID": "12345"}
    variables |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "host[0-1]", "SLURM_GPUS_ON_NODE": "4"} | more
    done = subprocess.run(["bash", SLURM, *words], env=variables, capture_output=True, text=True)
    asked = lambda name: (tmp_path / name).read_text().splitlines() if (tmp_path / name).exists() else []
    return done, [shlex.split(line) for line in asked("launch")], asked("srun"), asked("scontrol")

  return run


def test_slurm_starts_one_launcher_per_node(slurm, tmp_path):
  done, launched, srun, scontrol = slurm("my run.yml", "overlay=te-moe-bf16")
  assert (done.returncode, done.stdout, done.stderr, scontrol) == (0, "", "", [])
  assert "--container-image=registry#image:1" in srun and "--kill-on-bad-exit=1" in srun
  logs = f"{tmp_path}/out put/run/logs/12345-0"
  assert Path(logs).is_dir()
  for node, words in enumerate(launched):
    assert words.pop(0) == "launch"
    arguments = launch._parse(words)
    assert (arguments.nproc, arguments.nnodes, arguments.node_rank) == (4, 2, node)
    assert (arguments.coordinator, str(arguments.logs)) == ("host0:22345", logs)
    assert arguments.command == "train"
    rest, spec, _ = split_words(arguments.words)
    assert rest == ["my run.yml", "run_name=run", f"base_output_directory={tmp_path}/out put", "enable_autocheckpoint=true"]
    assert spec == "te-moe-bf16"


def test_slurm_names_the_first_failure_of_all_nodes(slurm):
  done, _, _, scontrol = slurm("model_name=x", status=3)
  assert done.returncode == 3
  assert "the run ended with status 3" in done.stdout
  assert done.stdout.splitlines()[-1] == "launch: 2026-01-01T00:00:04.000+00:00 the first to fail was rank 1"
  assert scontrol == []


def test_slurm_goes_on_after_the_time_limit(slurm):
  assert slurm("model_name=x", status=143)[3] == ["requeue 12345"]


@pytest.mark.parametrize("name", ["IMAGE", "OUTPUT"])
def test_slurm_asks_for_what_is_missing(slurm, name):
  done, launched, _, _ = slurm("model_name=x", **{name: ""})
  assert done.returncode != 0 and f"{name}: " in done.stderr and launched == []


@pytest.mark.parametrize("word", ["run_name=mine", "base_output_directory=/x", "enable_autocheckpoint=false"])
def test_slurm_overrides_no_word_of_the_user(slurm, word):
  done, launched, _, _ = slurm("model_name=x", word)
  assert (done.returncode, done.stderr, launched) == (2, f"{word}: this script sets it, from RUN_NAME and OUTPUT\n", [])


def test_slurm_starts_nothing_without_a_folder_for_logs(slurm, tmp_path):
  (tmp_path / "file").touch()
  done, launched, _, _ = slurm("model_name=x", OUTPUT=str(tmp_path / "file"))
  assert done.returncode == 2 and "Not a directory" in done.stderr and launched == []


def differences(value, schema, where="JobSet"):
  """Where a value departs from a schema; of JSON Schema, what Kubernetes' own definitions need."""
  types = schema.get("type", ())
  is_a = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
  if types and not any(isinstance(value, is_a[name]) for name in ([types] if isinstance(types, str) else types)):
    yield f"{where} is {value!r}, not {types}"
  elif isinstance(value, dict):
    yield from (f"{where}.{name} is missing" for name in schema.get("required", ()) if name not in value)
    fields = schema.get("properties")
    for name, field in value.items():
      if fields is not None and name not in fields:
        yield f"{where} has no field {name}"
      else:
        yield from differences(field, (fields or {}).get(name, schema.get("additionalProperties", {})), f"{where}.{name}")
  elif isinstance(value, list):
    for index, item in enumerate(value):
      yield from differences(item, schema.get("items", {}), f"{where}[{index}]")
  elif "enum" in schema and value not in schema["enum"]:
    yield f"{where} is {value!r}, not one of {schema['enum']}"


@pytest.fixture
def jobset():
  return yaml.safe_load(JOBSET.read_text())


def schema():
  return json.loads((Path(__file__).parent / "jobset_schema.json").read_text())


def test_jobset_is_valid(jobset):
  assert list(differences(jobset, schema())) == []


def test_the_schema_finds_mistakes(jobset):
  job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
  container = job["template"]["spec"]["containers"][0]
  job["paralelism"] = job.pop("parallelism")
  job["completions"] = "2"
  container["volumeMounts"][0].pop("mountPath")
  jobset["spec"]["failurePolicy"]["rules"][0]["action"] = "Stop"
  found = "\n".join(differences(jobset, schema()))
  for expected in ("has no field paralelism", "completions is '2', not integer", "mountPath is missing", "'Stop', not one of"):
    assert expected in found


def test_jobset_starts_one_launcher_per_node(jobset):
  (nodes,) = jobset["spec"]["replicatedJobs"]
  job = nodes["template"]["spec"]
  pod = job["template"]["spec"]
  (container,) = pod["containers"]
  names = {entry["name"] for entry in container["env"]}
  words = " ".join(container["args"])
  assert set(re.findall(r"\$\((\w+)\)", words)) <= names
  filled = words.replace("$(RUN)", jobset["metadata"]["name"]).replace("$(NODE_RANK)", "1").split()
  assert container["command"] == ["maxtext-moe-te", "launch"]
  arguments = launch._parse(filled)
  assert job["parallelism"] == job["completions"] == arguments.nnodes
  assert container["resources"]["limits"]["nvidia.com/gpu"] == arguments.nproc
  # The name that JobSet gives the first pod: JOBSET-REPLICATEDJOB-JOB-POD.JOBSET
  assert arguments.coordinator == f"{jobset['metadata']['name']}-{nodes['name']}-0-0.{jobset['metadata']['name']}:3400"
  assert container["ports"] == [{"containerPort": 3400}]
  assert arguments.grace < pod["terminationGracePeriodSeconds"]
  _, spec, _ = split_words(arguments.words)
  overlay.load(spec)
  mounts, volumes = ({entry["name"] for entry in entries} for entries in (container["volumeMounts"], pod["volumes"]))
  assert mounts == volumes
