"""Where caches are looked for: variables, defaults, and what is in their place."""

import os
from pathlib import Path

import pytest

from dsv4c.errors import CacheError
from dsv4c.jit_caches.kinds import KINDS
from dsv4c.jit_caches.places import chosen_kinds, find_places
from dsv4c.jit_caches.surroundings import Surroundings
from dsv4c.jit_caches.survey import survey
from dsv4c.jit_caches.usage import Usage
from tests.jit_caches.fake_trees import (
    TRITON_ENTRY,
    make_cache,
    make_older,
    place_of,
    surroundings,
    write_files,
)


@pytest.mark.parametrize(
    ("kind", "environ", "path"),
    [
        ("dsv4c", {}, "home/.cache/dsv4c/cubins"),
        ("dsv4c", {"XDG_CACHE_HOME": "/x"}, "/x/dsv4c/cubins"),
        ("dsv4c", {"XDG_CACHE_HOME": "x"}, "home/.cache/dsv4c/cubins"),
        ("dsv4c", {"DSV4C_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x"}, "/c"),
        ("inductor", {}, "tmp/torchinductor_me"),
        ("inductor", {"TORCHINDUCTOR_CACHE_DIR": "/c"}, "/c"),
        ("triton", {}, "home/.triton/cache"),
        ("triton", {"TRITON_HOME": "/t"}, "/t/.triton/cache"),
        ("triton", {"TRITON_HOME": "/t", "TRITON_CACHE_DIR": "/c"}, "/c"),
        ("triton", {"TRITON_CACHE_DIR": ""}, "home/.triton/cache"),
        ("tilelang", {}, "home/.tilelang/cache"),
        ("tilelang", {"TILELANG_CACHE_DIR": "/c"}, "/c"),
        ("deep_gemm", {}, "home/.deep_gemm"),
        ("deep_gemm", {"DG_JIT_CACHE_DIR": "/c"}, "/c"),
        ("flashinfer", {}, "home/.cache/flashinfer"),
        ("flashinfer", {"FLASHINFER_WORKSPACE_BASE": "/c"}, "/c/.cache/flashinfer"),
        ("vllm", {}, "home/.cache/vllm"),
        ("vllm", {"XDG_CACHE_HOME": "/x"}, "/x/vllm"),
        ("vllm", {"VLLM_CACHE_ROOT": "~/v"}, "home/v"),
        ("sglang", {}, "home/.cache/sglang"),
        ("sglang", {"SGLANG_CACHE_DIR": "/c/"}, "/c"),
        ("cute_dsl", {}, "tmp/me/cutlass_python_cache"),
        ("cute_dsl", {"CUTE_DSL_CACHE_DIR": "/c"}, "/c"),
        ("torch_extensions", {}, "home/.cache/torch_extensions"),
        ("torch_extensions", {"TORCH_EXTENSIONS_DIR": "/c"}, "/c"),
        ("cuda", {}, "home/.nv/ComputeCache"),
        ("cuda", {"CUDA_CACHE_PATH": "/c"}, "/c"),
        ("hf_kernels", {}, "home/.cache/huggingface/hub"),
        ("hf_kernels", {"HF_HOME": "/h"}, "/h/hub"),
        ("hf_kernels", {"HF_HOME": "/h", "HF_HUB_CACHE": "/u"}, "/u"),
        ("hf_kernels", {"HF_HUB_CACHE": "/u", "KERNELS_CACHE": "/k"}, "/k"),
    ],
    ids=str,
)
def test_where_a_tool_would_write(kind: str, environ: dict[str, str], path: str, tmp_path: Path) -> None:
    assert place_of(kind, tmp_path, environ).path == os.path.join(tmp_path, path)


def test_caches_that_serving_tools_put_into_their_own(tmp_path: Path) -> None:
    for folder in ("triton", "inductor", "tilelang", "deep_gemm", "nv", ".cache/flashinfer"):
        write_files(tmp_path / "home/.cache/sglang" / folder, ["x"])
    write_files(tmp_path / "home/.cache/vllm/deep_gemm", ["x"])
    found = {
        (place.kind, place.source) for place in find_places(KINDS.values(), surroundings(tmp_path)) if place.exists
    }
    nested = ("triton", "inductor", "tilelang", "deep_gemm", "cuda", "flashinfer")
    assert {(kind, "SGLang") for kind in nested} | {("deep_gemm", "vLLM")} <= found


def test_a_folder_comes_once(tmp_path: Path) -> None:
    write_files(tmp_path / "home/.triton/cache", TRITON_ENTRY)
    environ = {"TRITON_CACHE_DIR": str(tmp_path / "home/.triton/cache"), "TRITON_HOME": str(tmp_path / "home")}
    places = [place for place in find_places([KINDS["triton"]], surroundings(tmp_path, environ)) if place.exists]
    assert [place.source for place in places] == ["TRITON_CACHE_DIR"]


def test_inductor_folders_of_other_users_are_found(tmp_path: Path) -> None:
    for name in ("torchinductor_me", "torchinductor_you", "torchinductor_\n"):
        write_files(tmp_path / "tmp" / name, ["notes.txt"])
    places = list(find_places([KINDS["inductor"]], surroundings(tmp_path)))
    assert [Path(place.path).name for place in places] == ["torchinductor_me", "torchinductor_\n", "torchinductor_you"]


def test_folder_with_a_like_name_is_no_cache(tmp_path: Path) -> None:
    write_files(tmp_path / "tmp/torchinductor_photos", ["2026/cat.jpg", "ab/dog.jpg"])
    make_older(tmp_path, days=2)
    place = list(find_places([KINDS["inductor"]], surroundings(tmp_path)))[1]
    found = survey(place, Usage({}))
    assert not found.is_recognised and found.skipped == "does not look like this cache"


def test_link_in_the_place_of_a_cache(tmp_path: Path) -> None:
    real = make_cache("triton", tmp_path / "elsewhere")
    (tmp_path / "home/.triton").mkdir(parents=True)
    (tmp_path / "home/.triton/cache").symlink_to(real.path)
    place = place_of("triton", tmp_path)
    assert place.refusal == survey(place, Usage({})).skipped == "is a symbolic link, which is not followed"


def test_file_in_the_place_of_a_cache(tmp_path: Path) -> None:
    write_files(tmp_path / "home", [".triton/cache"])
    assert place_of("triton", tmp_path).refusal == "is no folder"
    write_files(tmp_path / "home", [".tilelang"])
    assert not place_of("tilelang", tmp_path).exists


def test_folder_that_cannot_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("dsv4c.jit_caches.places.os.lstat", refuse)
    assert place_of("triton", tmp_path).refusal == "Permission denied"


def test_unknown_kind() -> None:
    assert [kind.name for kind in chosen_kinds(["triton", "dsv4c", "triton"])] == ["dsv4c", "triton"]
    with pytest.raises(CacheError, match="no kind of cache 'trition'"):
        chosen_kinds(["trition"])


def test_surroundings_of_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOGNAME", "a/b")
    here = Surroundings.of_this_process()
    assert here.user == "a_b" and here.home == str(tmp_path / "home") and "/tmp" in here.temporary_folders
