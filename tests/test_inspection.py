"""What `inspect` says of a checkpoint."""

from dsv4c.checkpoint.checkpoint import open_checkpoint
from dsv4c.inspection import summarize_checkpoint
from tests.fixtures import TINY_OFFICIAL


def test_counts_of_the_bundled_checkpoint() -> None:
    checkpoint = open_checkpoint(TINY_OFFICIAL)
    summary = summarize_checkpoint(checkpoint)
    assert summary.layers == {"window": 2, "csa/4": 3, "hca/16": 3}
    assert (summary.experts, summary.experts_per_token, summary.hash_routed_layers) == (16, 4, 2)
    # 6 layers of the three kinds' 16 experts of three matrices.
    assert summary.encodings["fp4_group"].tensors == 8 * 16 * 3
    # Payload of the shards: everything but their headers.
    stored = sum(path.stat().st_size for path in checkpoint.shard_paths)
    weights = sum(total.size_bytes for total in summary.encodings.values())
    assert 0 < stored - weights < 200_000
