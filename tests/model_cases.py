"""Small random models with an engine and transformers' logits beside them, made once a test process."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode

from dsv4c.compiler import build_engine
from dsv4c.recipe import Numerics, Recipe
from tests.fixtures import (
    ODD_CONFIGS,
    Quantization,
    config_of,
    random_weights,
    read_weights,
    tiny_config_json,
    transformers_model,
    write_checkpoint,
)

Logits = npt.NDArray[np.float32]

CONFIGS: dict[str, dict[str, Any]] = {"tiny": tiny_config_json(num_nextn_predict_layers=0), **ODD_CONFIGS}
TOKENS = 300
SEQUENCES = 3


@dataclass(frozen=True)
class ModelCase:
    """A model on disk. `ids` int [SEQUENCES, TOKENS]; `logits` float32 [SEQUENCES, TOKENS, V] are transformers'."""

    checkpoint: Path
    engine: Path
    ids: npt.NDArray[np.int64]
    logits: Logits


class _StableTopK(TorchFunctionMode):
    """Ties in topk go to the lower index, as in dsv4c; the model and torch leave their order open.

    They are common: an entry that no indexer head likes scores exactly zero.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **(kwargs or {}))
        values, k = args
        ordered = values.sort(dim=-1, descending=True, stable=True)
        return torch.return_types.topk((ordered.values[..., :k], ordered.indices[..., :k]))


@cache
def checkpoint_of(name: str, quantization: Quantization) -> Path:
    """A checkpoint folder in official naming with seeded random weights, kept for the test process."""
    weights = random_weights(config_of(CONFIGS[name]), seed=7)
    folder = Path(mkdtemp(prefix=f"dsv4c-{name}-{quantization}-")) / name
    return write_checkpoint(folder, CONFIGS[name], weights, quantization=quantization)


@cache
def engine_of(name: str, quantization: Quantization, numerics: Numerics, kv: Literal["f32"] | None = None) -> Path:
    """Its engine, without goldens. `kv` "f32" keeps the KV cache and the index keys unpacked."""
    checkpoint = checkpoint_of(name, quantization)
    path = checkpoint.parent / f"{numerics}-{kv}.dsv4c"
    recipe = Recipe.for_target("cpu", None).with_overrides(numerics=numerics)
    if kv is not None:
        recipe = replace(recipe, kv=kv, index_keys=kv)
    build_engine(checkpoint, recipe, path, goldens=False)
    return path


@cache
def parity_case(name: str, quantization: Quantization) -> ModelCase:
    """The exact engine of a model, and what transformers computes with the values that its checkpoint holds."""
    checkpoint = checkpoint_of(name, quantization)
    config = config_of(CONFIGS[name])
    ids = torch.randint(0, config.vocab_size, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(11))
    model = transformers_model(CONFIGS[name], read_weights(checkpoint))
    with torch.no_grad(), _StableTopK():
        logits = model(ids, use_cache=False).logits.numpy()
    return ModelCase(checkpoint, engine_of(name, quantization, "exact"), ids.numpy(), logits)
