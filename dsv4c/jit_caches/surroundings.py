"""Where tools would look: the environment, the home folder and the temporary folders of this process."""

import getpass
import glob
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Surroundings:
    environ: Mapping[str, str]
    home: str
    temporary_folders: tuple[str, ...]  # the first is where tools write now
    user: str

    @classmethod
    def of_this_process(cls) -> "Surroundings":
        try:
            user = getpass.getuser()
        except (KeyError, OSError):
            user = f"uid_{os.getuid()}"
        # A cache may have been made while TMPDIR was another.
        folders = dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp"))
        return cls(dict(os.environ), os.path.expanduser("~"), tuple(folders), re.sub(r'[\\/:*?"<>|]', "_", user))

    def variable(self, name: str) -> str | None:
        """The folder that a variable names; an empty variable names none."""
        value = self.environ.get(name)
        if not value:
            return None
        return os.path.abspath(self.join(self.home, value[2:]) if value.startswith("~/") else value)

    def join(self, *parts: str) -> str:
        return os.path.join(*parts)

    def in_home(self, *parts: str) -> str:
        return os.path.join(self.home, *parts)

    def xdg_cache(self, *parts: str) -> str:
        # A relative one is to be ignored, as its specification says.
        shared = self.environ.get("XDG_CACHE_HOME", "")
        return os.path.join(shared if os.path.isabs(shared) else self.in_home(".cache"), *parts)

    def vllm_cache(self, *parts: str) -> str:
        return os.path.join(self.variable("VLLM_CACHE_ROOT") or self.xdg_cache("vllm"), *parts)

    def sglang_cache(self, *parts: str) -> str:
        """SGLang points the caches of other tools into its own, unless their variables say otherwise."""
        return os.path.join(self.variable("SGLANG_CACHE_DIR") or self.in_home(".cache", "sglang"), *parts)

    def sglang_diffusion_cache(self, *parts: str) -> str:
        root = self.variable("SGLANG_DIFFUSION_CACHE_ROOT") or self.xdg_cache("sgl_diffusion")
        return os.path.join(root, "torch_compile_cache", *parts)

    def temporary(self, *parts: str) -> str:
        return os.path.join(self.temporary_folders[0], *parts)

    def temporary_matches(self, pattern: str) -> Iterator[str]:
        for folder in self.temporary_folders:
            yield from sorted(glob.glob(os.path.join(glob.escape(folder), pattern)))
