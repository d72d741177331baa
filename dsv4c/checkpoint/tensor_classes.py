"""What a tensor is for, by its official name: the rows of size reports, and what may be quantised."""

import enum
import re

# What the released models quantise, and nothing else: the router, the compressors and the heads stay in float.
DENSE = re.compile(
    r"(layers|mtp)\.\d+\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|ffn\.shared_experts\.w[123])\.weight"
    r"|mtp\.\d+\.(e_proj|h_proj|main_proj)\.weight"
)
EXPERT = re.compile(r"(layers|mtp)\.\d+\.ffn\.experts\.\d+\.w[123]\.weight")


class TensorClass(enum.Enum):
    """In the order of a report."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    INDEXER = "indexer"
    COMPRESSOR = "compressor"
    ROUTER = "router"
    SHARED_EXPERT = "shared expert"
    EXPERTS = "experts"
    NORMS = "norms"
    MHC = "mHC"
    HEAD = "head"


# The first pattern that is found decides.
_CLASSES = (
    (re.compile(r"^embed\."), TensorClass.EMBEDDING),
    (re.compile(r"^head\."), TensorClass.HEAD),
    (re.compile(r"norm\.weight$"), TensorClass.NORMS),
    (re.compile(r"(^|\.)hc_"), TensorClass.MHC),
    (re.compile(r"\.indexer\."), TensorClass.INDEXER),
    (re.compile(r"\.compressor\."), TensorClass.COMPRESSOR),
    (re.compile(r"\.attn\."), TensorClass.ATTENTION),
    (re.compile(r"\.gate\."), TensorClass.ROUTER),
    (re.compile(r"\.shared_experts\."), TensorClass.SHARED_EXPERT),
    (re.compile(r"\.experts\."), TensorClass.EXPERTS),
)


def tensor_class(name: str) -> TensorClass:
    """The class of a tensor of the main model."""
    return next(kind for pattern, kind in _CLASSES if pattern.search(name))
