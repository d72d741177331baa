"""What the entries of each tool's cache look like. README.md in this folder says where each fact comes from."""

from dsv4c.jit_caches.layout import FileEntry, FolderEntry, Housekeeping, Layout

_HEX2 = r"[0-9a-f]{2}"
_HEX10 = r"[0-9a-f]{10}"
_HEX64 = r"[0-9a-f]{64}"
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_ANYTHING = r"[\s\S]+"
# Unfinished files of Inductor's and Triton's atomic writes: process, then thread or a random id.
_INDUCTOR_TMP = r"\.\d+\.\d+\.tmp"
_TRITON_TMP = rf"tmp\.pid_\d+_{_UUID}"

DSV4C_LAYOUT = Layout(
    phases=(
        (
            FileEntry((_HEX2, rf"{_HEX64}\.cubin"), first=(".cubin", ".json")),
            FileEntry((_HEX2, rf"{_HEX64}\.json")),
            FileEntry((_HEX2, rf"\.{_HEX64}\.\d+\.partial")),
        ),
    ),
    housekeeping=(
        Housekeeping((r"\.lock",), is_lock=True, stays=True),
        Housekeeping((r"DSV4C_CUBIN_CACHE",), stays=True),
    ),
    marker=("DSV4C_CUBIN_CACHE", b"dsv4c cubin cache 1"),
)

# The files of a stage, the launcher's libraries, tuning results, and what the atomic writes leave.
_TRITON_ONLY = (
    r"[^/]+\.(?:json|source|ttir|ttgir|glir|llir|ptx|cubin|sass|amdgcn|hsaco|spv|zebin|tttcir|asm|obj|so)"
    rf"|lock|{_TRITON_TMP}(?:/[^/]+)?"
)
_TRITON_KEY = r"[A-Z2-7]{52}"  # a SHA-256 in base 32


def _triton_entry(*parents: str) -> FolderEntry:
    # Every file of a kernel is found through `__grp__<name>.json`, which is written last.
    return FolderEntry((*parents, _TRITON_KEY), _TRITON_ONLY)


TRITON_LAYOUT = Layout(phases=((_triton_entry(),),))

_B32 = r"[a-z2-7]"
_SHARD = rf"{_B32}{{2}}"
_CODE = rf"c{_B32}{{51}}(?:\.[A-Za-z0-9_]+)+"
_PICKLES = rf"{_B32}{{51}}|{_INDUCTOR_TMP}"
INDUCTOR_LAYOUT = Layout(
    phases=(
        # A pickled graph of AOTAutograd names graphs of Inductor, whose pickles name code and kernels.
        (FolderEntry(("aotautograd", rf"a{_B32}{{51}}"), _PICKLES),),
        (FolderEntry(("fxgraph", _SHARD, rf"f{_B32}{{51}}"), _PICKLES),),
        (
            _triton_entry("triton", r"\d+"),
            FileEntry((_SHARD, rf"{_CODE}|{_HEX64}\.best_config|{_INDUCTOR_TMP}")),
            FileEntry(("precompiled_headers", rf"{_CODE}|{_INDUCTOR_TMP}")),
            FileEntry(("cache", _HEX64), proof=b'"system"'),
            FileEntry(("cutedsl_compile_cache", rf"{_HEX64}\.o|tmp\w+\.o\.tmp")),
            FileEntry(("dynamo", r"code_state_[^/]+\.pkl(?:\.tmp)?")),
        ),
    ),
    housekeeping=(
        Housekeeping(("locks", rf"c{_B32}{{51}}\.lock"), is_lock=True),
        Housekeeping(("precompiled_headers", "locks", rf"c{_B32}{{51}}\.lock"), is_lock=True),
        Housekeeping(("dynamo", r"code_state_[^/]+\.pkl\.lock"), is_lock=True),
    ),
)

_TILELANG_ONLY = r"[\w.-]+\.(?:cu|cpp|c|hip|cc|py|so|cubin|pkl|json)"
_TILELANG_VERSION = r"\d+\.\w[\w.+-]*"
_TILELANG_PLATFORM = r"(?:linux|darwin|win32)-[\w.-]+"
TILELANG_LAYOUT = Layout(
    phases=(
        # A tuning result is a copy of its kernel, and complete by itself.
        (
            FolderEntry(
                (_TILELANG_VERSION, _TILELANG_PLATFORM, "autotuner", _HEX64), _TILELANG_ONLY, (r"params\.pkl",)
            ),
            FolderEntry((_TILELANG_VERSION, _TILELANG_PLATFORM, "kernels", _HEX64), _TILELANG_ONLY, (r"params\.pkl",)),
            FolderEntry(
                (_TILELANG_VERSION, _TILELANG_PLATFORM, r"\.staging", rf"{_HEX64}_\d+_[0-9a-f]{{8}}"), _ANYTHING
            ),
            FileEntry((_TILELANG_VERSION, "cuda-binaries", rf"{_HEX64}\.\w+")),
            FileEntry(("tmp", rf"\d+_{_UUID}(?:\.\w+)?")),
            FileEntry(("py-cache", r"[^/]+\.[0-9a-f]{8}\.py")),
            # 0.1.6 and before: no folders for version and platform.
            FolderEntry((_HEX64,), _TILELANG_ONLY, (r"params\.pkl",)),
        ),
    ),
)

_DEEP_GEMM_TMP = r"\d+(?:-[0-9a-f]{8}){3}"
_DEEP_GEMM_ONLY = r"kernel\.(?:cu|cubin|ptx|sass|so|args)"
DEEP_GEMM_LAYOUT = Layout(
    phases=(
        (
            # A folder without both files makes DeepGEMM stop with an error, so half an entry must never be seen.
            FolderEntry(
                ("cache", r"kernel\.[^/]+\.[0-9a-f]{12}(?:[0-9a-f]{20})?"),
                _DEEP_GEMM_ONLY,
                (r"kernel\.(?:cu|cubin|so)",),
            ),
            FolderEntry(("tmp", _DEEP_GEMM_TMP), _DEEP_GEMM_ONLY),
            FileEntry(("tmp", rf"{_DEEP_GEMM_TMP}|(?:file|nvcc)\.tmp\.{_UUID}\.[0-9a-f]{{12}}(?:\.\w+)?")),
        ),
    ),
    housekeeping=(Housekeeping(("locks", r"\w+_n\d+_k\d+_g\d+\.lock"), is_lock=True),),  # SGLang's
)

_ARCHS = r"\d{2,3}[a-z]?(?:_\d{2,3}[a-z]?)*"


def _flashinfer(*parents: str) -> tuple[FolderEntry, ...]:
    return (
        # Not `tmp`, which holds the lock files.
        FolderEntry(
            (*parents, "cached_ops", r"(?!tmp$)[\w.+-]+"),
            r"(?:[\w+-]+/)*(?:[\w.+-]+\.(?:o|so|d|ninja|json|rsp|cubin|fatbin)|\.ninja_(?:log|deps|lock)|[\w+-]+)",
            (r"(?:[^/]+/)*(?:build\.ninja|meta\.json|[\w.+-]+\.so|[\w.+-]+\.o)",),
        ),
        FolderEntry(
            (*parents, "generated", r"[\w.+-]+"),
            _ANYTHING,
            (r"(?:[^/]+/)*[^/]+\.(?:cu|cuh|inc|h|cpp|jinja)",),
            has_links=True,
        ),
    )


def _cubins(*parents: str) -> FolderEntry:
    return FolderEntry(
        (*parents, rf"[0-9a-f]{{40}}|{_HEX64}"),
        r"(?:[^/]+/)*(?:[\w+-]+|[^/]+\.(?:cubin|txt|h|hpp|cuh|json|lock|tmp|so|o))",
        (r"(?:[^/]+/)*(?:[^/]+\.cubin|checksums\.txt)",),
        has_links=True,
    )


FLASHINFER_LAYOUT = Layout(
    phases=(
        # 0.3.1 had no folder for the version yet.
        (*_flashinfer(r"\d+\.\w[\w.+]*", _ARCHS), *_flashinfer(_ARCHS)),
        (_cubins("cubins"),),
    ),
    housekeeping=tuple(
        unit
        for parents in ((r"\d+\.\w[\w.+]*", _ARCHS), (_ARCHS,))
        for unit in (
            Housekeeping((*parents, "cached_ops", "tmp", r"[\w.+-]+\.lock"), is_lock=True),
            Housekeeping((*parents, "cached_ops", "tmp", r"flashinfer_jit\.ninja")),
            Housekeeping((*parents, r"flashinfer_jit\.log")),
        )
    ),
)
FLASHINFER_CUBIN_LAYOUT = Layout(phases=((_cubins(),),))

_RANK = r"rank_\d+_\d+"
VLLM_LAYOUT = Layout(
    phases=(
        # vLLM stops with "Inductor cache lookup failed" where a part is missing: a hash is one entry.
        (
            FolderEntry(("torch_compile_cache", "torch_aot_compile", _HEX64), _ANYTHING, (_RANK,)),
            FolderEntry(("torch_aot_compile", _HEX64), _ANYTHING, (_RANK,)),
        ),
        (FolderEntry(("torch_compile_cache", _HEX10), _ANYTHING, (_RANK,)),),
    ),
    is_shared=True,
)

_SGLANG_BUILD = (r"[\w.-]+", r"[\w.-]+", r"build-[0-9a-f]{16}")


def _sglang_jit(*parents: str) -> tuple[FolderEntry, ...]:
    return (
        FolderEntry((*parents, *_SGLANG_BUILD, r"deps-[0-9a-f]{16}"), _ANYTHING, (r"sgl_deps\.json",)),
        FolderEntry((*parents, *_SGLANG_BUILD, r"\.staging-[0-9a-f]{32}"), _ANYTHING),
    )


def _sglang_cute(*parents: str) -> tuple[FileEntry, ...]:
    objects = rf"{_HEX64}\.o|\.{_HEX64}\.tmp\.o"
    return (
        FileEntry((*parents, _HEX64, objects)),
        FileEntry((*parents, _HEX64, r"\w+", objects)),
    )


def _sglang_cute_locks(*parents: str) -> tuple[Housekeeping, ...]:
    lock = rf"{_HEX64}\.lock"
    return tuple(Housekeeping((*parents, _HEX64, *between, lock), is_lock=True) for between in ((), (r"\w+",)))


SGLANG_LAYOUT = Layout(
    phases=(
        (
            FolderEntry(("torch_compile_cache", _HEX10), _ANYTHING, (_RANK,)),
            *_sglang_jit("jit"),
            *_sglang_cute("cute_aot"),
        ),
    ),
    housekeeping=_sglang_cute_locks("cute_aot"),
    is_shared=True,
)
SGLANG_JIT_LAYOUT = Layout(phases=(_sglang_jit(),))
SGLANG_CUTE_LAYOUT = Layout(phases=(_sglang_cute(),), housekeeping=_sglang_cute_locks())

CUTE_DSL_LAYOUT = Layout(
    phases=(
        (
            FileEntry((r"cute_(?:experimental_)?dsl_[0-9a-f]{64}\.mlir",)),
            FolderEntry((_TRITON_TMP,), r"cute_(?:experimental_)?dsl_[0-9a-f]{64}\.mlir"),
        ),
    ),
)


def _extension(*parents: str) -> FolderEntry:
    # Sources other than the generated ones are somebody's own: `load` may be pointed at the folder of its sources.
    return FolderEntry(
        (*parents, r"[A-Za-z_]\w*"),
        r"main\.cpp|(?:cuda|hip)\.(?:cu|hip)|sycl\.sycl|build\.ninja|\.ninja_(?:log|deps|lock)|lock|[\w.-]+\.(?:o|so|d)",
        (r"build\.ninja",),
        proof=("build.ninja", b"-DTORCH_EXTENSION_NAME="),
        baton="lock",
    )


# The default folder has one for each Python and device; a folder that the variable names has not.
TORCH_EXTENSIONS_LAYOUT = Layout(phases=((_extension(r"py3\d+\w*_(?:cpu|cu\d+|rocm\w+|xpu\w*)"),),))
TORCH_EXTENSIONS_DIR_LAYOUT = Layout(phases=((_extension(),),))


def _is_cuda_index(head: bytes, size: int) -> bool:
    """Version and count of entries, then 16 bytes an entry; or nothing."""
    return size == 0 or (len(head) >= 8 and size == 16 + 16 * int.from_bytes(head[4:8], "little"))


# Measured with driver 580: an entry that is gone is compiled again although the index has it; without the index the
# driver throws away all other entries at its next write.
CUDA_LAYOUT = Layout(
    phases=((FileEntry((r"[0-9a-f]", r"[0-9a-f]", r"[0-9a-f]{14}")),),),
    housekeeping=(Housekeeping(("index",), check=_is_cuda_index),),
)

_SNAPSHOT = r"snapshots/[0-9a-f]{40}"
_HUB_PARTS = r"blobs(?:/[\w.-]+)?|refs(?:/[\s\S]+)?|\.no_exist(?:/[\s\S]+)?|snapshots"
HF_KERNELS_LAYOUT = Layout(
    phases=(
        (
            FolderEntry(
                (r"kernels--[\w.-]+",),
                rf"{_HUB_PARTS}|{_SNAPSHOT}(?:/[\s\S]+)?",
                (rf"{_SNAPSHOT}/build/torch[^/]*",),
                has_links=True,
            ),
            # Kernels were model repositories once. A snapshot with anything but `build` has more than a kernel.
            FolderEntry(
                (r"models--[\w.-]+",),
                rf"{_HUB_PARTS}|{_SNAPSHOT}(?:/build(?:/torch[^/]*(?:/[\s\S]+)?)?)?",
                (rf"{_SNAPSHOT}/build/torch[^/]*",),
                has_links=True,
            ),
        ),
    ),
    housekeeping=(Housekeeping((r"\.locks", r"kernels--[\w.-]+", r"[0-9a-f]+\.lock"), is_lock=True),),
    is_shared=True,
)
