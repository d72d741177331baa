"""The random models that other tests rely on are not trivial, and transformers runs them."""

from typing import Any

import pytest
import torch

from tests.fixtures import ODD_CONFIGS, config_of, random_weights, tiny_config_json, transformers_model


@pytest.mark.parametrize("config_json", [tiny_config_json(), *ODD_CONFIGS.values()])
def test_nothing_is_trivial(config_json: dict[str, Any]) -> None:
    config = config_of(config_json)
    weights = random_weights(config, seed=3)
    for name, tensor in weights.items():
        assert tensor.numel() == 1 or tensor.float().std() > 0.01, name
    hashed = [tensor for name, tensor in weights.items() if name.endswith("tid2eid")]
    assert len(hashed) == sum(layer.hash_routed for layer in config.layers)
    for ids in hashed:
        assert all(len(set(row)) == config.num_experts_per_tok for row in ids.tolist())
    again = random_weights(config, seed=3)
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())


@pytest.mark.parametrize("config_json", ODD_CONFIGS.values(), ids=ODD_CONFIGS.keys())
def test_transformers_runs_them(config_json: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    config = config_of(config_json)
    model = transformers_model(config_json, random_weights(config, seed=0))
    ids = torch.randint(0, config.vocab_size, (1, 70), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids).logits
    assert 0.5 < logits.std() < 2.0
