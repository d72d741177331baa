"""Fake caches of every kind: what a tool leaves on disk, as paths and contents, and what lies beside it."""

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from dsv4c.jit_caches.kinds import KINDS
from dsv4c.jit_caches.places import Place, find_places
from dsv4c.jit_caches.surroundings import Surroundings

HEX10, HEX40, HEX64 = "0123456789", "0123456789abcdef0123456789abcdef01234567", "0f" * 32
B51 = "abcdefgh234567" * 3 + "abcdefghi"
KEY = "ABCDEFGH234567" * 3 + "ABCDEFGHIJ"
UUID = "01234567-89ab-cdef-0123-456789abcdef"
DAY_NS = 86400 * 10**9

TRITON_ENTRY = (
    *(f"{KEY}/k.{stage}" for stage in ("source", "ttir", "ttgir", "llir", "ptx", "cubin", "json")),
    f"{KEY}/__grp__k.json",
)
EXTENSION = {
    "ext/build.ninja": "ninja_required_version = 1.3\ncflags = -DTORCH_EXTENSION_NAME=ext -fPIC\n",
    "ext/main.cpp": "int add();",
    "ext/main.o": "o",
    "ext/ext.so": "so",
    "ext/.ninja_log": "log",
    "ext/.ninja_deps": "deps",
}
SNAPSHOT = f"snapshots/{HEX40}"


def hub(folder: str) -> dict[str, str]:
    build = f"{folder}/{SNAPSHOT}/build/torch28-cxx11-cu128-x86_64-linux"
    return {
        f"{folder}/refs/main": HEX40,
        f"{folder}/blobs/{HEX64}": "the library",
        f"{build}/__init__.py": "",
        f"{build}/_kernel.abi3.so -> ../../../../blobs/{HEX64}": "",
    }


# Kind -> (entries, files of entries, files that go with the last entry). A name with ` -> ` is a symbolic link.
ENTRIES: dict[str, tuple[int, Mapping[str, str] | Iterable[str], Iterable[str]]] = {
    "dsv4c": (
        4,
        (
            f"0f/{HEX64}.cubin",
            f"0f/{HEX64}.json",
            f"ab/{'ab' * 32}.cubin",  # never finished
            f"cd/{'cd' * 32}.json",
            f"cd/.{'cd' * 32}.4711.partial",
        ),
        (),
    ),
    "inductor": (
        10,
        {
            f"aotautograd/a{B51}/{B51}": "pickle",
            f"fxgraph/ab/f{B51}/{B51}": "pickle",
            f"fxgraph/ab/f{B51}/.12.34.tmp": "half a pickle",
            f"triton/0/{TRITON_ENTRY[0]}": "source",
            f"triton/0/{TRITON_ENTRY[-1]}": "{}",
            f"ab/c{B51}.py": "code",
            f"ab/c{B51}.main.cpp": "code",
            f"ab/c{B51}.main.so": "library",
            f"ab/{HEX64}.best_config": "{}",
            "cd/.12.34.tmp": "half a file",
            f"precompiled_headers/c{B51}.h.gch": "header",
            f"cache/{HEX64}": '{\n    "system": {},\n    "cache": {}\n}',
        },
        (f"locks/c{B51}.lock", f"precompiled_headers/locks/c{B51}.lock"),
    ),
    "triton": (
        3,
        (
            *TRITON_ENTRY,
            f"{KEY[::-1]}/cuda_utils.cpython-311-x86_64-linux-gnu.so",
            f"{'A' * 52}/tmp.pid_12_{UUID}/k.ptx",
        ),
        (),
    ),
    "tilelang": (
        7,
        (
            *(
                f"0.1.10/linux-x86_64/kernels/{HEX64}/{name}"
                for name in ("device_kernel.cu", "executable.so", "params.pkl")
            ),
            *(f"0.1.10/linux-x86_64/autotuner/{HEX64}/{name}" for name in ("best_config.json", "params.pkl")),
            f"0.1.10/linux-x86_64/.staging/{HEX64}_12_0123abcd/device_kernel.cu",
            f"0.1.10/cuda-binaries/{HEX64}.cubin",
            f"tmp/12_{UUID}",
            "py-cache/kernel.0123abcd.py",
            *(f"{HEX64}/{name}" for name in ("kernel.cu", "kernel_lib.so", "params.pkl")),
        ),
        (),
    ),
    "deep_gemm": (
        4,
        (
            f"cache/kernel.gemm.{'0f' * 16}/kernel.cu",
            f"cache/kernel.gemm.{'0f' * 16}/kernel.cubin",
            "cache/kernel.gemm.0123456789ab/kernel.so",
            "tmp/12-01234567-89abcdef-01234567/kernel.cu",
            f"tmp/nvcc.tmp.{UUID}.0123456789ab.cubin",
        ),
        ("locks/GROUPED_n4096_k7168_g8.lock",),
    ),
    "flashinfer": (
        4,
        {
            "0.6.9/90a/cached_ops/norm/build.ninja": "rule",
            "0.6.9/90a/cached_ops/norm/norm.so": "so",
            "0.6.9/90a/cached_ops/norm/obj/norm.o": "o",
            "0.6.9/90a/generated/norm/norm.cu": "cu",
            "0.6.9/90a/generated/norm/include -> /usr/include": "",
            "80_90/cached_ops/page/page.so": "so",
            f"cubins/{HEX40}/fmha/trtllm-gen/kernel.cubin": "cubin",
            f"cubins/{HEX40}/fmha/trtllm-gen/kernel.cubin.lock": "",
        },
        ("0.6.9/90a/cached_ops/tmp/norm.lock", "0.6.9/90a/flashinfer_jit.log"),
    ),
    "vllm": (
        3,
        (
            f"torch_compile_cache/{HEX10}/rank_0_0/backbone/computation_graph.py",
            f"torch_compile_cache/{HEX10}/rank_0_0/inductor_cache/ab/c{B51}.py",
            f"torch_compile_cache/torch_aot_compile/{HEX64}/rank_0_0/model",
            f"torch_aot_compile/{HEX64}/rank_1_0/model",
        ),
        (),
    ),
    "sglang": (
        5,
        (
            f"torch_compile_cache/{HEX10}/rank_0_0/backbone/sglang_compile_cache.py",
            "jit/sm_90a/norm/build-0123456789abcdef/deps-0123456789abcdef/sgl_deps.json",
            "jit/sm_90a/norm/build-0123456789abcdef/deps-0123456789abcdef/norm.so",
            "jit/sm_90a/norm/build-0123456789abcdef/.staging-0123456789abcdef0123456789abcdef/norm.o",
            f"cute_aot/{HEX64}/{HEX64}.o",
            f"cute_aot/{HEX64}/attention/{HEX64}.o",
        ),
        (f"cute_aot/{HEX64}/{HEX64}.lock",),
    ),
    "cute_dsl": (2, (f"cute_dsl_{HEX64}.mlir", f"tmp.pid_12_{UUID}/cute_dsl_{HEX64}.mlir"), ()),
    "torch_extensions": (1, {f"py311_cu128/{path}": text for path, text in EXTENSION.items()}, ()),
    "cuda": (2, ("0/e/55b981a7ab5445", "9/a/478c92402697a8"), ("index",)),
    "hf_kernels": (
        2,
        hub("kernels--org--norm") | hub("models--org--old"),
        (f".locks/kernels--org--norm/{HEX64}.lock",),
    ),
}

# What has no business in a cache and must survive: like names, other people's things, things of the tool's user.
NEIGHBOURS: dict[str, Iterable[str]] = {
    "dsv4c": ("notes.txt", f"0f/{HEX64}.txt", f"0f/{HEX64}", "zz/a.cubin"),
    "inductor": (
        "notes.txt",
        "ab/notes.py",
        f"ab/c{B51}",
        f"cache/{'ab' * 32}",  # no JSON of Inductor's
        "triton/0/notes/a.ptx",
        f"aotautograd/a{B51[::-1]}/my notes",
        f"c{B51}/package.pt2",  # what AOTInductor made is a product
    ),
    "triton": (
        "notes.txt",
        f"{'B' * 52}/thesis.tex",
        f"{'C' * 52}/deep/k.json",
        f"{KEY.lower()}/k.json",
        f"{KEY}X/k.json",
    ),
    "tilelang": ("0.1.10/notes.txt", f"0.1.10/linux-x86_64/kernels/{'ab' * 32}/device_kernel.cu", "py-cache/kernel.py"),
    "deep_gemm": (
        "cache/kernel.mine/a.cu",
        "tmp/2026-08-22.txt",
        "locks/mine.lock",
        f"cache/kernel.a.{'ab' * 16}/a.txt",
    ),
    "flashinfer": ("notes.txt", "0.6.9/90a/cached_ops/mine/notes.txt", "0.6.9/90a/notes.txt", f"cubins/{HEX64}/a.pdf"),
    "vllm": (
        "assets/cat.jpg",
        "torch_compile_cache/my_models/rank_0_0/model",
        f"torch_compile_cache/{HEX10[::-1]}/model",
    ),
    "sglang": ("jit/sm_90a/norm/notes.txt", f"cute_aot/{HEX64}/notes.o", "models/a.safetensors"),
    "cute_dsl": ("notes.mlir", "cute_dsl_mine.mlir"),
    "torch_extensions": ("py311_cu128/project/build.ninja", "py311_cu128/project/main.cpp", "notes.txt"),
    "cuda": ("0/e/notes", "0/notes.txt", "f/55b981a7ab5445"),
    "hf_kernels": (
        f"models--org--weights/{SNAPSHOT}/model.safetensors",
        f"models--org--weights/{SNAPSHOT}/build/torch28-cxx11-cu128-x86_64-linux/a.so",
        f"datasets--org--text/{SNAPSHOT}/build/torch28/a.txt",
        f"kernels--org--empty/{SNAPSHOT}/README.md",
    ),
}


def write_files(folder: Path, files: Mapping[str, str] | Iterable[str]) -> None:
    texts = files if isinstance(files, Mapping) else dict.fromkeys(files, "data")
    for name, text in texts.items():
        name, _, target = name.partition(" -> ")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if target:
            path.symlink_to(target)
        else:
            path.write_text(text, encoding="utf-8")


def make_older(folder: Path, days: float) -> None:
    """Sets the times of everything in a folder."""
    moment = time.time_ns() - int(days * DAY_NS)
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, ns=(moment, moment), follow_symlinks=False)


def contents(folder: Path) -> set[str]:
    """Every file and link below, by its path."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def names_of(files: Mapping[str, str] | Iterable[str]) -> set[str]:
    return {name.partition(" -> ")[0] for name in files}


def surroundings(folder: Path, environ: Mapping[str, str] | None = None) -> Surroundings:
    """A home and a temporary folder of the test's own, so that no real cache is ever found."""
    return Surroundings(dict(environ or {}), str(folder / "home"), (str(folder / "tmp"),), "me")


def place_of(kind: str, folder: Path, environ: Mapping[str, str] | None = None) -> Place:
    """Where the tool would write."""
    return next(iter(find_places([KINDS[kind]], surroundings(folder, environ))))


def make_cache(kind: str, folder: Path, days: float = 2) -> Place:
    """A fake cache with its neighbours, `days` old."""
    _, entries, housekeeping = ENTRIES[kind]
    path = Path(place_of(kind, folder).path)
    write_files(path, entries)
    write_files(path, dict.fromkeys(housekeeping, ""))
    write_files(path, NEIGHBOURS[kind])
    if kind == "dsv4c":
        write_files(path, {"DSV4C_CUBIN_CACHE": "dsv4c cubin cache 1\n", ".lock": ""})
    make_older(path, days)
    place = place_of(kind, folder)
    assert place.exists and place.refusal is None
    return place
