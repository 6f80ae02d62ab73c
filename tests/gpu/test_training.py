"""MaxText trains 20 steps on GPUs: with Transformer Engine's parts on one GPU, over ranks of NCCL EP, and on several GPUs in one
process, against MaxText's own layer."""

import json
import sys

import pytest

from tests import helpers, tolerances
from tests.benchmarks import losses as benchmark

pytestmark = [pytest.mark.gpu, pytest.mark.te, pytest.mark.host]

SEVERAL_GPUS_MODEL = "deepseek3"


def train(keys, folder):
  results = benchmark.train(keys, folder)
  print("LOSSES", json.dumps({"/".join(key): value for key, value in results.items()}), file=sys.stderr)
  return results


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
  """(model, run) -> 20 losses, or what was printed if there are fewer."""
  runs = [run for run in benchmark.RUNS if run not in benchmark.SEVERAL_GPUS]
  return train([(model, run) for model in benchmark.MODELS for run in runs], tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def losses_of_several_gpus(losses, tmp_path_factory):
  return losses | train([(SEVERAL_GPUS_MODEL, run) for run in benchmark.SEVERAL_GPUS], tmp_path_factory.mktemp("several"))


def check(losses, model, run):
  ours, plain = losses[model, run], losses[model, "plain"]
  assert isinstance(ours, list), ours
  assert isinstance(plain, list), plain
  ours, plain = ([{"learning/loss": loss} for loss in losses] for losses in (ours, plain))
  helpers.assert_same_losses(ours, plain, moved=0.1, bound=tolerances.BFLOAT16_TRAINING_LOSS)


@pytest.mark.parametrize("run", ["te", "te-mesh", "te-mesh-chunks", "te-mesh-exact"])
@pytest.mark.parametrize("model", benchmark.MODELS)
def test_losses_are_maxtexts(losses, model, run):
  check(losses, model, run)


@pytest.mark.gpus
@pytest.mark.parametrize("run", benchmark.SEVERAL_GPUS)
def test_losses_of_several_gpus(losses_of_several_gpus, run):
  check(losses_of_several_gpus, SEVERAL_GPUS_MODEL, run)


@pytest.mark.parametrize("model", benchmark.MODELS)
def test_the_tolerance_is_bfloat16s(losses, model):
  """MaxText's own bfloat16 differs from its float32 by a good part of the tolerance, so the tolerance is no wider than the noise."""
  differences = [abs(a - b) / b for a, b in zip(losses[model, "plain"], losses[model, "plain-float32"])]
  assert max(differences) > tolerances.BFLOAT16_TRAINING_LOSS / 10
