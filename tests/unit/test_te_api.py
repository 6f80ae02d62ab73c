"""Transformer Engine is judged by its names and signatures, not by its version: recorded states, spoiled copies, and what is adapted."""

import contextlib
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_moe_te.errors import RefusedError, VersionError
from maxtext_moe_te.host import engine, parts
from maxtext_moe_te.moe import te_api, te_router, te_runtime
from maxtext_moe_te.moe.experts import reference, te
from maxtext_moe_te.moe.rules import RouterRule, Weighting
from maxtext_moe_te.moe.transport import nccl_ep
from maxtext_moe_te.settings.config import MoeTeOptions
from maxtext_moe_te.signatures import Package
from tests import te_stub, tolerances

GROUP = nccl_ep.Bootstrap(num_experts=8, experts_per_token=2, ranks=2, max_tokens_per_rank=4, width=16)
DROPS = "has jax.ep.ep_bootstrap without a parameter drop_on_overflow"


@pytest.fixture
def installed(monkeypatch, tmp_path):
  engine.experts_error.cache_clear()
  yield functools.partial(te_stub.install, monkeypatch, tmp_path)
  engine.experts_error.cache_clear()


def te_module(name):
  return importlib.import_module(f"transformer_engine.jax.{name}")


# Judged


@pytest.mark.parametrize(
  ("state", "problems", "serves_hopper", "borrows", "sqrtsoftplus"),
  [("main", {}, False, False, False), ("2.20.2", {}, True, True, True), ("2.18.0", {"nccl_ep": DROPS}, False, False, False)],
)
def test_recorded_states(tmp_path, state, problems, serves_hopper, borrows, sqrtsoftplus):
  engine = te_api.Api(Package(te_stub.write(tmp_path, state)), complete=False)
  assert {part: problem for part in te_api.PARTS if (problem := engine.problem(part))} == problems
  assert (engine.serves_hopper, engine.borrows, engine.has_score_function("sqrtsoftplus")) == (serves_hopper, borrows, sqrtsoftplus)
  assert engine.has_score_function("sigmoid") and engine.nccl_floor == 23004


@pytest.mark.parametrize("version", ["2.20.0.dev0", "2.20.0.dev0+abc1234", "9.0", "1.0"])
def test_no_version_decides(installed, version):
  installed("main", version=version)
  parts.check_options(MoeTeOptions(router="te", experts="te", transport="nccl_ep"))
  assert te_api.installed().version == version


def renamed(old, new):
  return lambda text: text.replace(old, new)


SPOILED = {
  "a renamed parameter": (
    "experts", "jax.cpp_extensions.gemm", renamed("use_v2_ffi", "use_v3_ffi"),
    "has jax.cpp_extensions.gemm.GroupedGemmPrimitive.abstract without a parameter use_v2_ffi",
  ),
  "a missing function": (
    "nccl_ep", "jax.ep", renamed("def ep_finalize", "def ep_end"), "has no jax.ep.ep_finalize",
  ),
  "a new parameter": (
    "nccl_ep", "jax.cpp_extensions.ep", renamed("(handle_mem_aval, expert_out_aval, *,", "(handle_mem_aval, expert_out_aval, *, scale,"),
    "has jax.cpp_extensions.ep.EpCombinePrimitive.abstract with a parameter scale, which is not passed",
  ),
  "another order of arrays": (
    "nccl_ep", "jax.cpp_extensions.ep", renamed("(handle_mem_aval, topk_idx_aval,", "(topk_idx_aval, handle_mem_aval,"),
    "has jax.cpp_extensions.ep.EpDispatchPrimitive.abstract(topk_idx_aval, handle_mem_aval, tokens_aval, topk_weights_aval), and "
    "(handle_mem_aval, topk_idx_aval, tokens_aval, topk_weights_aval) are passed",
  ),
  "a parameter that **kwargs would swallow": (
    "mxfp8", "jax.quantize", renamed("n_groups", "groups"), "has jax.quantize.QuantizerFactory.create_set without a parameter n_groups",
  ),
  "a missing member": (
    "router", "jax.cpp_extensions.router", renamed("BYTEMAP", "BYTES"), "has no jax.cpp_extensions.router.RoutingMapFormat.BYTEMAP",
  ),
  "a function that is none": (
    "nccl_ep", "jax.ep", renamed("def ep_finalize(): return None", "ep_finalize = print"),
    "has jax.ep.ep_finalize, whose parameters cannot be read",
  ),
  "a text that is no Python": ("nccl_ep", "jax.ep", lambda text: text + "def (", "has no jax.ep.ep_bootstrap"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILED)
@pytest.mark.parametrize("live", [False, True])
def test_a_spoiled_copy_is_refused_before_anything_starts(installed, case, live):
  part, module, edit, problem = SPOILED[case]
  folder = installed("2.20.2", edit={module: edit})
  if live and "text" not in case:  # of what is imported, the objects are asked
    importlib.import_module(f"transformer_engine.{module}")
    if "none" in case:
      te_module("ep").ep_finalize = object()
  option, fix = {
    "experts": ({"experts": "te"}, "moe_te.experts=ragged_dot"),
    "nccl_ep": ({"transport": "nccl_ep"}, "moe_te.transport=xla"),
    "mxfp8": ({"recipe": "mxfp8"}, "moe_te.recipe=bf16"),
    "router": ({"router": "te"}, "moe_te.router=jax"),
  }[part]
  ((name, value),) = option.items()
  with pytest.raises(VersionError) as refused:
    parts.check_options(MoeTeOptions(**option))
  assert str(refused.value) == (
    f"moe_te.{name}={value}, and transformer-engine 2.20.2 in {folder} {problem}; needed: what the plugin calls of it, as 2.20.2 has it. "
    f"Fix: set {fix}, or pip install 'transformer-engine[jax]==2.20.2'."
  )
  others = {"experts", "mxfp8", "router", "nccl_ep"} - {part}
  assert not [other for other in others if te_api.installed().problem(other)], "of the other parts, each can be used"


@pytest.mark.parametrize(
  ("spoiled", "part", "problem"),
  [
    (dict(targets=None), "experts", "has no JAX extension (transformer_engine_jax*.so)"),
    (dict(version=""), "experts", "has no metadata (dist-info), which its own import asks for"),
    (dict(targets="te_grouped_gemm_v2_ffi"), "nccl_ep", "has a JAX extension that was built without te_ep_prepare_ffi"),
    (dict(targets="te_grouped_gemm_ffi te_ep_prepare_ffi"), "experts", "has a JAX extension that was built without te_grouped_gemm_v2_ffi"),
  ],
)
def test_an_installation_that_lacks_something(installed, spoiled, part, problem):
  installed("2.20.2", **spoiled)
  assert te_api.installed().problem(part).startswith(problem)
  assert bool(te_api.installed().incomplete) == ("built" not in problem)


def test_none_is_installed(monkeypatch):
  monkeypatch.setattr(te_api, "find", lambda: None)
  with pytest.raises(VersionError, match=r"^moe_te\.experts=te, and transformer-engine is not installed; needed: .*Fix: pip install"):
    parts.check_options(MoeTeOptions(experts="te"))


# Adapted


@pytest.mark.parametrize(("state", "hopper", "scales"), [("main", False, 4), ("2.20.2", False, 4), ("2.20.2", True, 1)])
def test_grouped_products_of_every_state(installed, state, hopper, scales):
  installed(state)
  kernel = te_stub.grouped_gemm(state, hopper=hopper)
  keys = jax.random.split(jax.random.key(0), 3)
  rows, kernels = jax.random.normal(keys[0], (32, 16), jnp.bfloat16), jax.random.normal(keys[1], (4, 16, 8), jnp.bfloat16)
  weights, sizes = jax.random.normal(keys[2], (32, 8)), jnp.array([5, 0, 17, 10], jnp.int32)

  def gradients(multiply):
    return jax.value_and_grad(lambda r, k: (multiply(r, k, sizes).astype(jnp.float32) * weights).sum(), (0, 1))(rows, kernels)

  for ours, expected in zip(jax.tree.leaves(gradients(te.grouped_matmul)), jax.tree.leaves(gradients(reference.grouped_matmul))):
    ours, expected = np.float32(ours), np.float32(expected)
    assert np.linalg.norm(ours - expected) <= tolerances.BFLOAT16_ROUNDING * np.linalg.norm(expected)
  assert len(kernel.calls) == 3 and {arrays[11].size for arrays, _ in kernel.calls} == {scales}


def test_hopper_needs_one_scale_for_all(installed):
  device = type("Device", (), {"platform": "gpu", "compute_capability": "9.0"})()
  installed("main")
  with pytest.raises(RefusedError, match=r"^a Hopper GPU with transformer-engine 2\.20\.0\.dev0, which gives its grouped GEMM a scale for"):
    engine.check_experts("bf16", device)
  device.compute_capability = "10.0"
  engine.check_experts("bf16", device)


def test_hopper_is_served_by_2_20_2(installed):
  installed("2.20.2")
  engine.check_experts("bf16", type("Device", (), {"platform": "gpu", "compute_capability": "9.0"})())


@pytest.mark.parametrize("state", ["main", "2.20.2"])
def test_communicators_are_shared_where_that_exists(installed, monkeypatch, state):
  installed(state)
  monkeypatch.setattr(jax, "local_device_count", lambda: 2)
  if state == "2.20.2":
    te_module("cpp_extensions.ep").use_nccl_comm_from_xla = lambda: True
    nccl_ep.check_local_devices()
    te_module("cpp_extensions.ep").use_nccl_comm_from_xla = lambda: False
  with pytest.raises(RefusedError, match="2 GPUs in one process"):
    nccl_ep.check_local_devices()


@pytest.mark.parametrize("state", ["main", "2.20.2"])
def test_nccl_ep_is_called_as_every_state_has_it(installed, monkeypatch, state):
  """Bootstrap, one dispatch and combine with their gradients, end; parameters and shapes, not what travels."""
  installed(state)
  ep, told = te_module("cpp_extensions.ep"), []
  zeros, rows = jnp.zeros, GROUP.capacity
  results = {
    "EpPrepare": lambda idx, **_: (zeros((1, 4), jnp.int32), zeros((1, 1), jnp.int32), zeros((1, 8), jnp.uint8)),
    "EpDispatch": lambda handle, idx, x, w, **_: (zeros((1, rows, 16), x.dtype), zeros((1, rows), jnp.float32)),
    "EpDispatchBwd": lambda handle, grad, gw, *, out_leading_shape, **_: (zeros((*out_leading_shape, 16)), zeros((*out_leading_shape, 2))),
    "EpCombine": lambda handle, out, *, out_leading_shape, **_: zeros((*out_leading_shape, 16), out.dtype),
    "EpCombineBwd": lambda handle, grad, **_: zeros((1, rows, 16), grad.dtype),
  }
  primitives = {}
  for name, compute in results.items():
    owner = getattr(ep, f"{name}Primitive")
    owner.inner_primitive = primitives[name] = te_stub.Primitive(owner.abstract, compute)
  ep._on_collective_stream = lambda func: func
  bound = te_module("ep").ep_bootstrap
  monkeypatch.setattr(te_module("ep"), "ep_bootstrap", lambda **given: (bound(**given), told.append(given)))
  monkeypatch.setattr(te_module("sharding"), "global_shard_guard", contextlib.nullcontext)
  monkeypatch.setattr(te_module("sharding"), "MeshResource", lambda *, ep_resource: ep_resource)
  monkeypatch.setattr(nccl_ep, "_bootstrapped", None)

  nccl_ep.bootstrap(GROUP, jax.make_mesh((2,), ("expert",)), "expert")
  assert told[0]["recv_capacity_per_rank"] == GROUP.capacity and nccl_ep.bootstrapped() == GROUP
  transport = nccl_ep.NcclEpTransport(GROUP)

  def loss(x, weights):
    sent = transport.dispatch(x, jnp.zeros((4, 2), jnp.int32), weights, distinct=True)
    return transport.combine(sent.rows * sent.row_weights[:, None], sent.handle, sum_dtype=jnp.float32).sum()

  gradients = jax.grad(loss, (0, 1))(zeros((4, 16)), zeros((4, 2)))
  assert [gradient.shape for gradient in gradients] == [(4, 16), (4, 2)]
  assert {name: len(primitive.calls) for name, primitive in primitives.items()} == dict.fromkeys(results, 1)


@pytest.mark.parametrize("state", ["main", "2.20.2"])
def test_the_router_is_called_as_every_state_has_it(installed, state):
  installed(state)
  router = te_module("cpp_extensions.router")
  forward = lambda logits, bias, **_: (logits, logits > 1, logits)
  for direction, compute in (("Fwd", forward), ("Bwd", lambda selected, saved, grad, **_: grad)):
    owner = getattr(router, f"FusedTopkWithScoreFunction{direction}Primitive")
    owner.inner_primitive = te_stub.Primitive(owner.abstract, compute)
  logits = jnp.arange(8.0).reshape(2, 4)
  route = lambda logits: te_router.route(RouterRule(experts_per_token=2), logits, te_router.routing.RouterInputs(), dtype=jnp.float32)
  assert jax.grad(lambda logits: route(logits).weights.sum())(logits).shape == (2, 4)
  rule = RouterRule(
    experts_per_token=2, score_function="sqrtsoftplus", bias=True, weights_ignore_bias=True, weighting=Weighting.SCORES, renormalize=True,
    renormalize_epsilon=1e-20,
  )  # fmt: skip
  options = MoeTeOptions(router="te")
  if state == "2.20.2":
    parts.check_router(options, rule, "float32")
  else:
    with pytest.raises(RefusedError, match="it has no score function sqrtsoftplus"):
      parts.check_router(options, rule, "float32")


@pytest.mark.parametrize("line", te_stub.RECORD["receive_capacities"][::7])
def test_receive_capacity_is_transformer_engines(line):
  tokens, ranks, experts, k, factor, rows = map(float, line.split())
  group = nccl_ep.Bootstrap(
    num_experts=int(experts), experts_per_token=int(k), ranks=int(ranks), max_tokens_per_rank=int(tokens), width=8, capacity_factor=factor
  )
  assert group.capacity == rows


@pytest.mark.parametrize(("bundled", "needed"), [(False, "2.30.4"), (True, "2.32.3")])
def test_the_nccl_that_nccl_ep_takes(installed, monkeypatch, bundled, needed):
  """Of the library beside the wheels what it was measured to take; of one that is linked in what Transformer Engine says."""
  folder = installed("main")
  if bundled:
    (folder / "wheel_lib/libnccl_ep.so").touch()
  monkeypatch.setattr(te_runtime, "nccl_version", lambda: 23001)
  with pytest.raises(VersionError, match=rf"NCCL 2\.30\.1 at run time; needed: {needed} or newer for NCCL EP"):
    te_runtime.prepare_nccl_ep()
