"""Small random models with an engine and transformers' logits beside them, made once a test process."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
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
# Scores of routers and indexers are of order 1 and differ between kernels by some 1e-6. Some sequences of random
# tokens have a closer choice than this.
MIN_MARGIN = 2e-5
MAX_DRAWS = 20


@dataclass(frozen=True)
class ModelCase:
    """A model on disk. `ids` int [SEQUENCES, TOKENS]; `logits` float32 [SEQUENCES, TOKENS, V] are transformers'."""

    checkpoint: Path
    engine: Path
    ids: npt.NDArray[np.int64]
    logits: Logits


class _Choices(TorchFunctionMode):
    """Ties in topk go to the lower index, as in dsv4c; the model and torch leave their order open.

    They are common: an entry that no indexer head likes scores exactly zero. `margins` float32 [SEQUENCES] is by how
    much the last score that a sequence chose was above the next, at its closest choice that is no exact tie: below the
    rounding of the scores, other kernels choose otherwise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.margins = torch.full((SEQUENCES,), torch.inf)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **(kwargs or {}))
        values, k = args
        ordered = values.sort(dim=-1, descending=True, stable=True)
        if values.shape[-1] > k:
            margins = (ordered.values[..., k - 1] - ordered.values[..., k]).view(SEQUENCES, -1)
            # No number: both are masked entries.
            open_choices = torch.where(margins > 0, margins, torch.inf)
            self.margins = torch.minimum(self.margins, open_choices.amin(-1))
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
    """The exact engine of a model, and what transformers computes with the values that its checkpoint holds.

    Its sequences are drawn until no choice of experts or entries in them is nearly tied.
    """
    checkpoint = checkpoint_of(name, quantization)
    config = config_of(CONFIGS[name])
    model = transformers_model(CONFIGS[name], read_weights(checkpoint))
    generator = torch.Generator().manual_seed(11)
    kept: list[tuple[Tensor, Tensor]] = []
    for _ in range(MAX_DRAWS):
        ids = torch.randint(0, config.vocab_size, (SEQUENCES, TOKENS), generator=generator)
        with torch.no_grad(), _Choices() as choices:
            logits = model(ids, use_cache=False).logits
        kept += [(ids[i], logits[i]) for i in range(SEQUENCES) if choices.margins[i] >= MIN_MARGIN]
        if len(kept) >= SEQUENCES:
            break
    else:
        raise AssertionError(f"{MAX_DRAWS * SEQUENCES} sequences hold only {len(kept)} without a nearly tied choice")
    all_ids, all_logits = (torch.stack(column).numpy() for column in zip(*kept[:SEQUENCES], strict=True))
    return ModelCase(checkpoint, engine_of(name, quantization, "exact"), all_ids, all_logits)
