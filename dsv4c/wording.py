"""How messages write numbers."""


def counted(count: int, noun: str) -> str:
    """`1 shard`, `2 shards`, `1,000 shards`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
