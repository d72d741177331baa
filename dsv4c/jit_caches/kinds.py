"""The caches that `dsv4c cache` knows: one `Kind` a tool, and its places.

A kind is recognised by what its entries look like (`known_layouts.py`); whatever else lies beside them is left alone.
README.md in this folder says where each fact comes from.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsv4c.jit_caches.known_layouts import (
    CUDA_LAYOUT,
    CUTE_DSL_LAYOUT,
    DEEP_GEMM_LAYOUT,
    DSV4C_LAYOUT,
    FLASHINFER_CUBIN_LAYOUT,
    FLASHINFER_LAYOUT,
    HF_KERNELS_LAYOUT,
    INDUCTOR_LAYOUT,
    SGLANG_CUTE_LAYOUT,
    SGLANG_JIT_LAYOUT,
    SGLANG_LAYOUT,
    TILELANG_LAYOUT,
    TORCH_EXTENSIONS_DIR_LAYOUT,
    TORCH_EXTENSIONS_LAYOUT,
    TRITON_LAYOUT,
    VLLM_LAYOUT,
)
from dsv4c.jit_caches.layout import Layout
from dsv4c.jit_caches.surroundings import Surroundings


@dataclass(frozen=True)
class Candidate:
    """A folder that may be a cache: where, by what rule, and with which layout."""

    path: str
    source: str
    layout: Layout


@dataclass(frozen=True)
class Kind:
    name: str
    tool: str
    candidates: Callable[[Surroundings], Iterator[Candidate]]  # where the tool would write now comes first


def _dsv4c(here: Surroundings) -> Iterator[Candidate]:
    chosen = here.variable("DSV4C_CACHE_DIR")
    # As a build does: with the variable set, the default folder is not this user's cache.
    if chosen is not None:
        yield Candidate(chosen, "DSV4C_CACHE_DIR", DSV4C_LAYOUT)
    else:
        yield Candidate(here.xdg_cache("dsv4c", "cubins"), "default", DSV4C_LAYOUT)


def _inductor(here: Surroundings) -> Iterator[Candidate]:
    chosen = here.variable("TORCHINDUCTOR_CACHE_DIR")
    if chosen is not None:
        yield Candidate(chosen, "TORCHINDUCTOR_CACHE_DIR", INDUCTOR_LAYOUT)
    yield Candidate(here.temporary(f"torchinductor_{here.user}"), "default", INDUCTOR_LAYOUT)
    for path in here.temporary_matches("torchinductor_*"):
        yield Candidate(path, "default, any user", INDUCTOR_LAYOUT)
    yield Candidate(here.in_home(".cache", "torch_inductor"), "default of its CuTe DSL part", INDUCTOR_LAYOUT)
    yield Candidate(here.sglang_cache("inductor"), "SGLang", INDUCTOR_LAYOUT)
    yield Candidate(here.sglang_diffusion_cache("inductor"), "SGLang diffusion", INDUCTOR_LAYOUT)


def _triton(here: Surroundings) -> Iterator[Candidate]:
    chosen, home = here.variable("TRITON_CACHE_DIR"), here.variable("TRITON_HOME")
    if chosen is not None:
        yield Candidate(chosen, "TRITON_CACHE_DIR", TRITON_LAYOUT)
    if home is not None:
        yield Candidate(here.join(home, ".triton", "cache"), "TRITON_HOME", TRITON_LAYOUT)
    yield Candidate(here.in_home(".triton", "cache"), "default", TRITON_LAYOUT)
    yield Candidate(here.sglang_cache("triton"), "SGLang", TRITON_LAYOUT)
    yield Candidate(here.sglang_diffusion_cache("triton"), "SGLang diffusion", TRITON_LAYOUT)


def _tilelang(here: Surroundings) -> Iterator[Candidate]:
    chosen = here.variable("TILELANG_CACHE_DIR")
    if chosen is not None:
        yield Candidate(chosen, "TILELANG_CACHE_DIR", TILELANG_LAYOUT)
    yield Candidate(here.in_home(".tilelang", "cache"), "default", TILELANG_LAYOUT)
    yield Candidate(here.sglang_cache("tilelang"), "SGLang", TILELANG_LAYOUT)


def _deep_gemm(here: Surroundings) -> Iterator[Candidate]:
    for name in ("DG_JIT_CACHE_DIR", "SGLANG_DG_CACHE_DIR"):
        chosen = here.variable(name)
        if chosen is not None:
            yield Candidate(chosen, name, DEEP_GEMM_LAYOUT)
    yield Candidate(here.in_home(".deep_gemm"), "default", DEEP_GEMM_LAYOUT)
    yield Candidate(here.vllm_cache("deep_gemm"), "vLLM", DEEP_GEMM_LAYOUT)
    yield Candidate(here.sglang_cache("deep_gemm"), "SGLang", DEEP_GEMM_LAYOUT)


def _flashinfer_places(here: Surroundings) -> Iterator[Candidate]:
    base = here.variable("FLASHINFER_WORKSPACE_BASE")
    if base is not None:
        yield Candidate(here.join(base, ".cache", "flashinfer"), "FLASHINFER_WORKSPACE_BASE", FLASHINFER_LAYOUT)
    cubins = here.variable("FLASHINFER_CUBIN_DIR")
    if cubins is not None:
        yield Candidate(cubins, "FLASHINFER_CUBIN_DIR", FLASHINFER_CUBIN_LAYOUT)
    yield Candidate(here.in_home(".cache", "flashinfer"), "default", FLASHINFER_LAYOUT)
    yield Candidate(here.sglang_cache(".cache", "flashinfer"), "SGLang", FLASHINFER_LAYOUT)


def _vllm(here: Surroundings) -> Iterator[Candidate]:
    chosen = here.variable("VLLM_CACHE_ROOT")
    if chosen is not None:
        yield Candidate(chosen, "VLLM_CACHE_ROOT", VLLM_LAYOUT)
    yield Candidate(here.xdg_cache("vllm"), "default", VLLM_LAYOUT)


def _sglang(here: Surroundings) -> Iterator[Candidate]:
    for name, layout in (
        ("SGLANG_CACHE_DIR", SGLANG_LAYOUT),
        ("SGLANG_JIT_CACHE_DIR", SGLANG_JIT_LAYOUT),
        ("SGLANG_CUTE_AOT_CACHE_DIR", SGLANG_CUTE_LAYOUT),
    ):
        chosen = here.variable(name)
        if chosen is not None:
            yield Candidate(chosen, name, layout)
    yield Candidate(here.in_home(".cache", "sglang"), "default", SGLANG_LAYOUT)


def _cute_dsl(here: Surroundings) -> Iterator[Candidate]:
    for name in ("CUTE_DSL_CACHE_DIR", "CUTE_EXPERIMENTAL_DSL_CACHE_DIR"):
        chosen = here.variable(name)
        if chosen is not None:
            yield Candidate(chosen, name, CUTE_DSL_LAYOUT)
    yield Candidate(here.temporary(here.user, "cutlass_python_cache"), "default", CUTE_DSL_LAYOUT)
    yield Candidate(here.temporary("cutlass_python_cache"), "default without a user name", CUTE_DSL_LAYOUT)


def _torch_extensions(here: Surroundings) -> Iterator[Candidate]:
    chosen = here.variable("TORCH_EXTENSIONS_DIR")
    if chosen is not None:
        yield Candidate(chosen, "TORCH_EXTENSIONS_DIR", TORCH_EXTENSIONS_DIR_LAYOUT)
    yield Candidate(here.xdg_cache("torch_extensions"), "default", TORCH_EXTENSIONS_LAYOUT)


def _cuda(here: Surroundings) -> Iterator[Candidate]:
    chosen = here.variable("CUDA_CACHE_PATH")
    if chosen is not None:
        yield Candidate(chosen, "CUDA_CACHE_PATH", CUDA_LAYOUT)
    yield Candidate(here.in_home(".nv", "ComputeCache"), "default", CUDA_LAYOUT)
    yield Candidate(here.sglang_cache("nv"), "SGLang", CUDA_LAYOUT)


def _hf_kernels(here: Surroundings) -> Iterator[Candidate]:
    for name in ("KERNELS_CACHE", "HF_KERNELS_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        chosen = here.variable(name)
        if chosen is not None:
            yield Candidate(chosen, name, HF_KERNELS_LAYOUT)
    home = here.variable("HF_HOME")
    if home is not None:
        yield Candidate(here.join(home, "hub"), "HF_HOME", HF_KERNELS_LAYOUT)
    yield Candidate(here.xdg_cache("huggingface", "hub"), "default", HF_KERNELS_LAYOUT)


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("dsv4c", "dsv4c's cubins", _dsv4c),
        Kind("inductor", "TorchInductor", _inductor),
        Kind("triton", "Triton", _triton),
        Kind("tilelang", "TileLang", _tilelang),
        Kind("deep_gemm", "DeepGEMM", _deep_gemm),
        Kind("flashinfer", "FlashInfer", _flashinfer_places),
        Kind("vllm", "vLLM", _vllm),
        Kind("sglang", "SGLang", _sglang),
        Kind("cute_dsl", "CuTe DSL", _cute_dsl),
        Kind("torch_extensions", "torch.utils.cpp_extension", _torch_extensions),
        Kind("cuda", "CUDA driver", _cuda),
        Kind("hf_kernels", "Hugging Face kernels", _hf_kernels),
    )
}
