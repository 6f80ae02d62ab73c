"""Padding that is sent nowhere: output, load, balance loss and every gradient are those of the real tokens by themselves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_moe_te.moe import block, routing
from tests.numerics import contract, oracle
from tests.numerics.contract import CASES, Case

# The real tokens of each of 8 sequences: all, the first ones, the last ones, some with gaps, one, none.
REAL = np.array([[int(place) for place in row] for row in (
  "11111111", "11111000", "00011111", "11011010", "00100000", "00000000", "11111111", "10000000",
)], bool)  # fmt: skip
IN_ONE = np.arange(32)[None] < 21  # one sequence over all devices: the last of 4 has nothing real
PADDED = {
  "softmax": CASES["softmax"],
  "deepseek3": CASES["deepseek3"],
  "gpt_oss": CASES["gpt_oss"],
  "llama4": CASES["llama4"],
  "gemma4": CASES["gemma4"],
  "replayed_unused": CASES["replayed_unused"],
  "one_sequence": CASES["one_sequence"],
  "one_sequence_deepseek3": dataclasses.replace(CASES["deepseek3"], batch=1, sequence=32),
}
MESHES = {"local": {"data": 1}, "local-data2": {"data": 2}, "xla-expert2": {"expert": 2}, "xla-expert4": {"expert": 4}}
# Both balance losses on both transports, and both transports whole and in parts; the other rules once.
RUNS = [
  ("softmax", "local", 1), ("softmax", "xla-expert4", 2), ("deepseek3", "local-data2", 2), ("deepseek3", "xla-expert2", 1),
  ("gpt_oss", "xla-expert2", 2), ("llama4", "xla-expert4", 1), ("gemma4", "local", 2), ("replayed_unused", "xla-expert2", 1),
  ("one_sequence", "xla-expert4", 2), ("one_sequence_deepseek3", "xla-expert4", 1),
]  # fmt: skip


class Setting(contract.Contract):
  """A mesh and a number of parts; the contract's own tests are elsewhere."""

  def __init__(self, mesh: str, chunks: int):
    self.axes, self.chunks = MESHES[mesh], chunks

  def run(self, case: Case, padding=None, real: bool = True) -> dict:
    """Results of the layer, `padding` standing in x and logits where there is padding; `real=False` hides that from the layer."""
    spec, arrays, cotangent = self.problem(case)
    mask = real_of(case)
    if padding is not None:
      arrays |= {name: jnp.where(mask[..., None], arrays[name], padding) for name in ("x", "logits")}
    layout = self.layout(case.batch, case.sequence)
    parts = dataclasses.replace(self.parts(layout, spec.num_experts), chunks=self.chunks)
    return contract.run_block(spec, arrays | ({"real": mask} if real else {}), cotangent, layout=layout, parts=parts)


def real_of(case: Case):
  return jnp.asarray(REAL if case.batch == 8 else IN_ONE)


@functools.cache
def of_real_tokens(name: str) -> dict:
  """The oracle's results for the real tokens alone, one sequence after the other, each cut to its own.

  The load-balance loss is the mean over the sequences that have any.
  """
  case = PADDED[name]
  spec, arrays, cotangent = Setting("local", 1).problem(case)
  real = np.asarray(real_of(case))
  sequences = [b for b in range(case.batch) if real[b].any()]
  spec = dataclasses.replace(spec, load_balance_coefficient=spec.load_balance_coefficient / len(sequences))
  totals = {}
  for b in sequences:
    cut = lambda a, b=b: a[b : b + 1, real[b]]
    inputs = arrays["router_inputs"]
    if inputs.replayed_experts is not None:
      inputs = inputs._replace(replayed_experts=cut(inputs.replayed_experts))
    alone = arrays | {"x": cut(arrays["x"]), "logits": cut(arrays["logits"]), "router_inputs": inputs}
    for key, value in oracle.results(spec, alone, cut(cotangent)).items():
      if key in ("y", "d_x", "d_logits"):  # of each token; zero for padding
        whole = totals.setdefault(key, np.zeros((*real.shape, value.shape[-1])))
        whole[b, real[b]] = value[0]
      elif key not in ("margin", "kink", "divisor"):
        totals[key] = totals.get(key, 0) + value
  return totals


@pytest.mark.parametrize(("name", "mesh", "chunks"), RUNS)
def test_equals_the_real_tokens_alone(name, mesh, chunks):
  setting, case = Setting(mesh, chunks), PADDED[name]
  actual = setting.run(case)
  assert actual.pop("overflow") == 0
  assert actual["rows_per_expert"].sum() == of_real_tokens(name)["rows_per_expert"].sum()
  contract.assert_close(actual, of_real_tokens(name), **setting.tolerances)
  for key in ("y", "d_x", "d_logits"):
    assert not actual[key][~np.asarray(real_of(case))].any(), f"{key} of padding"


@pytest.mark.parametrize(("name", "mesh"), [("softmax", "local"), ("deepseek3", "xla-expert2"), ("llama4", "xla-expert4")])
def test_nothing_depends_on_what_stands_in_padding(name, mesh):
  """Not one bit of anything, whatever it is."""
  setting = Setting(mesh, 1)
  expected = setting.run(PADDED[name])
  for padding in (1e3, np.nan):
    for key, value in setting.run(PADDED[name], padding).items():
      assert value.tobytes() == expected[key].tobytes(), (key, padding)
  unmasked, other = (setting.run(PADDED[name], padding, real=False) for padding in (None, 1e3))
  assert any(unmasked[key].tobytes() != other[key].tobytes() for key in expected), "padding that is routed shows"


def test_padding_has_unused_places_without_weight():
  """Whatever a transport does with the weight of a place that it sends nowhere."""
  routed = routing.Routing(jnp.zeros((8, 8, 2), jnp.int32), jnp.ones((8, 8, 2)), jnp.zeros((8, 8, 4)))
  found = routing.without_padding(routed, jnp.asarray(REAL), 4)
  assert (found.experts == np.where(REAL, 0, 4)[..., None]).all() and (found.weights == REAL[..., None]).all()


def test_a_batch_of_padding_only():
  setting, case = Setting("xla-expert2", 2), PADDED["deepseek3"]
  spec, arrays, cotangent = setting.problem(case)
  layout = setting.layout(case.batch, case.sequence)
  parts = dataclasses.replace(setting.parts(layout, spec.num_experts), chunks=2)
  arrays["real"] = jnp.zeros(REAL.shape, bool)
  for key, value in contract.run_block(spec, arrays, cotangent, layout=layout, parts=parts).items():
    assert not np.any(value), f"{key} should be zero, and a number"


def test_only_rows_of_real_tokens_are_received():
  setting, case = Setting("local", 1), PADDED["softmax"]
  spec, arrays, _ = setting.problem(case)
  layout = setting.layout(case.batch, case.sequence)
  given = (arrays["x"], arrays["logits"], arrays["router_inputs"], arrays["weights"])
  out = jax.jit(functools.partial(block.moe_block, spec=spec, layout=layout, parts=setting.parts(layout, 8)))(*given, real=REAL)
  assert out.received.max() == out.rows_per_expert.sum() == REAL.sum() * 2
