"""ModelConfig -> the FX graph of one `step`: every layer, the head and the sampling.

The graph is plain aten where passes should see through it and `dsv4::` operators where there is state. Its inputs are
those of `step_abi.Input`, then state planes, weights and constants, each annotated; sizes that only the run knows are
symbols. Weights are float32 here whatever their storage: `quantize_weights` brings the stored form in.
"""

import math
from collections.abc import Mapping

import torch
from torch.fx import Graph, GraphModule, Node

from dsv4c.checkpoint.checkpoint import WeightInfo
from dsv4c.checkpoint.config import LayerKind, ModelConfig
from dsv4c.errors import GraphError
from dsv4c.graph import expert_ops, fused_ops, hyper_connections, moe, ops, sampling, state_ops
from dsv4c.graph.annotations import GraphInfo, Numerics, set_info
from dsv4c.graph.attention import attention
from dsv4c.graph.scope import LayerScope, ModelScope, Placeholders, StepInputs, shared_symbols
from dsv4c.graph.step_module import StepModule
from dsv4c.step_abi import Input, LaunchFlag

# Importing these registers the dsv4:: operators.
OPERATOR_MODULES = (ops, state_ops, sampling, fused_ops, expert_ops)
BASE_BLOCK_TOKENS = 256

aten, dsv4 = torch.ops.aten, torch.ops.dsv4


def block_tokens(config: ModelConfig) -> int:
    """Positions a state block covers: 256, or the next multiple that holds whole groups of every layer."""
    return math.lcm(BASE_BLOCK_TOKENS, *(max(layer.ratio, 1) for layer in config.layers))


def build_graph(
    config: ModelConfig, weights: Mapping[str, WeightInfo], numerics: Numerics, rollback_rows: int
) -> GraphModule:
    """The step graph of a model.

    `weights` gives the stored form of every weight by official name; `rollback_rows` is how many positions `truncate`
    may take back. Raises GraphError where the configuration cannot be written as a graph.
    """
    _check(config, numerics)
    graph = Graph()
    symbols = shared_symbols()
    placeholders = Placeholders(graph, symbols)
    inputs = _inputs(placeholders, config.vocab_size)
    model = ModelScope(placeholders, config, weights, numerics, block_tokens(config), rollback_rows, inputs)
    streams = _embed(LayerScope(model))
    for index in range(config.num_hidden_layers):
        streams = _layer(LayerScope(model, index), streams)
    logits = _head(LayerScope(model, flags=LaunchFlag.HEAD), streams)
    sampled = LayerScope(model, flags=LaunchFlag.HEAD | LaunchFlag.SAMPLE).call(
        "sampled",
        dsv4.sample.default,
        logits,
        inputs.logits_rows,
        inputs.positions,
        inputs.temperature,
        inputs.top_k,
        inputs.top_p,
        inputs.seed,
        inputs.mask,
    )
    graph.output((logits, sampled))
    gm = StepModule(torch.nn.Module(), graph, class_name="Step")
    set_info(gm, GraphInfo(config, numerics, symbols.names(), block_tokens(config)))
    return gm


def _check(config: ModelConfig, numerics: Numerics) -> None:
    width = config.index_head_dim
    indexed = any(layer.kind is LayerKind.CSA for layer in config.layers)
    if numerics == "reference" and indexed and width & (width - 1):
        raise GraphError(
            f"`index_head_dim` is {width}; the Hadamard transform of the reference numerics needs a power of two",
            hint='build with `numerics = "exact"`',
        )


def _inputs(placeholders: Placeholders, vocab_size: int) -> StepInputs:
    def add(what: Input, shape: tuple[int | str, ...], dtype: torch.dtype) -> Node:
        return placeholders.add(what.name.lower(), what, shape, dtype)

    return StepInputs(
        token_ids=add(Input.TOKEN_IDS, ("T",), torch.int32),
        slots=add(Input.SLOTS, ("T",), torch.int32),
        positions=add(Input.POSITIONS, ("T",), torch.int32),
        block_table=add(Input.BLOCK_TABLE, ("S", "M"), torch.int32),
        logits_rows=add(Input.LOGITS_ROWS, ("R",), torch.int32),
        temperature=add(Input.TEMPERATURE, ("R",), torch.float32),
        top_k=add(Input.TOP_K, ("R",), torch.int32),
        top_p=add(Input.TOP_P, ("R",), torch.float32),
        seed=add(Input.SEED, ("R",), torch.int64),
        mask=add(Input.MASK, ("R", -(-vocab_size // 32)), torch.int32),
    )


def _embed(scope: LayerScope) -> Node:
    """n identical copies of each token's embedding: [T, n, D]."""
    config = scope.config
    table = scope.parameter("embed.weight", (config.vocab_size, config.hidden_size))
    row = scope.call("embedded", aten.embedding.default, table, scope.inputs.token_ids)
    row = scope.act("embedded", row)
    wide = scope.call("embedded_wide", aten.unsqueeze.default, row, 1)
    return scope.call("streams", aten.expand.default, wide, [-1, config.hc_mult, -1])


def _mixer(scope: LayerScope, name: str, streams: Node) -> tuple[Node, Node, Node]:
    config = scope.config
    n = config.hc_mult
    return hyper_connections.mix(
        scope,
        name,
        streams,
        scope.parameter(f"{name}_fn", ((2 + n) * n, n * config.hidden_size)),
        scope.parameter(f"{name}_scale", (3,)),
        scope.parameter(f"{name}_base", ((2 + n) * n,)),
        config,
        scope.act_dtype,
    )


def _layer(scope: LayerScope, streams: Node) -> Node:
    assert scope.layer is not None
    config, dtype = scope.config, scope.act_dtype
    layer = config.layers[scope.layer]
    for name, norm in (("hc_attn", "attn_norm"), ("hc_ffn", "ffn_norm")):
        collapsed, post, comb = _mixer(scope, name, streams)
        x = scope.norm(norm, collapsed, f"{norm}.weight", config.hidden_size)
        y = attention(scope, layer, x) if name == "hc_attn" else _moe(scope, x, layer.hash_routed)
        streams = hyper_connections.combine(scope, name, y, streams, post, comb, dtype)
    return streams


def _moe(scope: LayerScope, x: Node, hash_routed: bool) -> Node:
    """Routed experts and the shared one: [T, D]."""
    config = scope.config
    experts, k, inner, hidden = (
        config.n_routed_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        config.hidden_size,
    )
    # The router runs in fp32 whatever the activations are.
    logits = scope.linear("ffn_logits", x, "ffn.gate.weight", experts, hidden, dtype=torch.float32)
    scores = moe.scores(scope, logits)
    if hash_routed:
        table = scope.parameter("ffn.gate.tid2eid", (config.vocab_size, k), torch.int64)
        ids = moe.choose_by_token(scope, scope.inputs.token_ids, table)
    else:
        bias = scope.parameter("ffn.gate.bias", (experts,))
        ids = moe.choose_by_score(scope, scores, bias, config)
    weights = moe.route_weights(scope, scores, ids, config)
    expert = "ffn.experts.{expert}"
    w13 = scope.expert_parameter(
        "ffn.experts.w13", (f"{expert}.w1.weight", f"{expert}.w3.weight"), (inner, inner), hidden
    )
    w2 = scope.expert_parameter("ffn.experts.w2", (f"{expert}.w2.weight",), (hidden,), inner)
    routed = moe.routed_experts(scope, x, ids, weights, w13, w2, config, scope.act_dtype)
    width = inner * config.n_shared_experts
    shared = moe.shared_expert(
        scope,
        x,
        scope.parameter("ffn.shared_experts.w1.weight", (width, hidden)),
        scope.parameter("ffn.shared_experts.w3.weight", (width, hidden)),
        scope.parameter("ffn.shared_experts.w2.weight", (hidden, width)),
        config,
        scope.act_dtype,
    )
    total = scope.call("ffn_sum", aten.add.Tensor, routed, scope.f32("ffn_shared", shared))
    return scope.act("ffn_sum", total)


def _head(scope: LayerScope, streams: Node) -> Node:
    """Float32 logits [R, V] of the asked rows."""
    config = scope.config
    n = config.hc_mult
    rows = scope.call("head_streams", aten.index_select.default, streams, 0, scope.inputs.logits_rows)
    fn = scope.parameter("hc_head_fn", (n, n * config.hidden_size))
    collapsed = hyper_connections.head(
        scope,
        rows,
        fn,
        scope.parameter("hc_head_scale", (1,)),
        scope.parameter("hc_head_base", (n,)),
        config,
        scope.act_dtype,
    )
    x = scope.norm("head_norm", collapsed, "norm.weight", config.hidden_size)
    return scope.linear("logits", x, "head.weight", config.vocab_size, config.hidden_size, dtype=torch.float32)
