"""Engines and sessions: the runtime library with numpy arrays. Needs neither torch nor the compiler.

with Engine.open("model.dsv4c") as engine:
    for token in engine.generate(prompt_ids, max_new_tokens=32):
        ...
"""

import ctypes
import json
import os
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from dsv4c.engine.format import SectionType
from dsv4c.errors import EngineFormatError, SessionError
from dsv4c.runtime import library as lib
from dsv4c.runtime.session import EngineInfo, Handle, Sampling, Session
from dsv4c.runtime.step_arrays import INT32_MAX, Ids, IntArray, int32_array


class Engine:
    """An open engine file, shared by sessions and threads. `Engine.open` makes one."""

    def __init__(self, handle: Handle, path: str) -> None:
        self._handle: Handle | None = handle
        self._library = lib.load_library()
        self.path = path
        self.info = self._read_info()

    @classmethod
    def open(cls, path: str | os.PathLike[str], threads: int | None = None, device: int = 0) -> Self:
        """Open and check an engine; the weights themselves are checked by `verify_weights`.

        `threads`: how many a step on the cpu uses, or read the weights of a GPU; None: one per processor. `device`:
        which GPU runs an engine that needs one, counted as the driver does ($CUDA_VISIBLE_DEVICES).
        """
        library = lib.load_library()
        if threads is not None and not 1 <= threads <= 4096:
            raise SessionError(f"threads is {threads}, expected 1 to 4096")
        if b"\0" in os.fsencode(path):
            raise EngineFormatError(f"{os.fspath(path)!r} holds a zero byte and names no file")
        if not 0 <= device <= INT32_MAX:
            raise SessionError(f"device is {device}, expected the index of a GPU")
        options = lib.EngineOptions(struct_size=ctypes.sizeof(lib.EngineOptions), threads=threads or 0, device=device)
        pointer = ctypes.c_void_p()
        status = library.dsv4c_engine_open(os.fsencode(path), ctypes.byref(options), ctypes.byref(pointer))
        lib.check(status, os.fspath(path))
        return cls(Handle(pointer.value, library.dsv4c_engine_close), os.fspath(path))

    def _open(self) -> Handle:
        if self._handle is None:
            raise SessionError("the engine is closed")
        return self._handle

    def close(self) -> None:
        """Close the engine; its sessions stay usable."""
        self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_info(self) -> EngineInfo:
        info = lib.Info(struct_size=ctypes.sizeof(lib.Info))
        lib.check(self._library.dsv4c_engine_get_info(self._open().pointer, ctypes.byref(info)))
        return EngineInfo(
            arch=info.arch.decode(),
            vocab_size=info.vocab_size,
            max_context=info.max_context,
            layer_count=info.layer_count,
            hidden_size=info.hidden_size,
            block_tokens=info.block_tokens,
            rollback_rows=info.rollback_rows,
            bos_token_id=None if info.bos_token_id < 0 else info.bos_token_id,
            eos_token_ids=tuple(info.eos_token_ids[: info.eos_count]),
            world_size=info.world_size,
            rank=info.rank,
            weight_bytes=info.weight_bytes,
            threads=info.threads,
            device=info.device.decode(errors="replace") or None,
            sm_count=info.sm_count,
            weight_seconds=info.weight_seconds,
            counted_layers=info.counted_layers,
            counted_experts=info.counted_experts,
        )

    def _section(self, section: SectionType) -> bytes | None:
        handle = self._open()
        data, size = ctypes.c_void_p(), ctypes.c_uint64()
        lib.check(self._library.dsv4c_engine_section(handle.pointer, section, ctypes.byref(data), ctypes.byref(size)))
        return None if data.value is None else ctypes.string_at(data.value, size.value)

    def manifest(self) -> dict[str, Any]:
        manifest: dict[str, Any] = json.loads(self._section(SectionType.MANIFEST) or b"{}")
        return manifest

    def tokenizer_files(self) -> dict[str, str]:
        """File name -> text."""
        files: dict[str, str] = json.loads(self._section(SectionType.TOKENIZER) or b"{}")
        return files

    def goldens(self) -> dict[str, Any] | None:
        section = self._section(SectionType.GOLDENS)
        return None if section is None else json.loads(section)

    def verify_weights(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read every weight and compare it with its digest; `progress(done bytes, total bytes)` now and then."""
        handle = self._open()
        raised: list[BaseException] = []

        def on_progress(_: object, done: int, total: int) -> int:
            try:
                if progress is not None:
                    progress(done, total)
            except BaseException as error:  # noqa: BLE001 (raised below, past the C frames)
                raised.append(error)
                return 1
            return 0

        function = lib.PROGRESS_FUNCTION(on_progress)
        status = self._library.dsv4c_engine_verify_weights(handle.pointer, function, None)
        if raised:
            raise raised[0]
        lib.check(status, self.path)

    def session(
        self, slots: int = 1, context: int | None = None, *, poison: bool = False, graphs: bool = True
    ) -> Session:
        """State for `slots` sequences of up to `context` positions (None: as many as the engine allows).

        On the cpu memory is taken as positions are filled, on a GPU at once. For debugging: `poison` fills fresh memory
        with NaN instead of zeros, and without `graphs` a GPU is given every launch by itself.
        """
        handle = self._open()
        context = self.info.max_context if context is None else context
        if not 1 <= slots <= INT32_MAX:
            raise SessionError(f"a session of {slots} slots is not possible")
        if not 1 <= context <= self.info.max_context:
            raise SessionError(f"context of {context} positions; the engine allows 1 to {self.info.max_context}")
        options = lib.SessionOptions(
            struct_size=ctypes.sizeof(lib.SessionOptions),
            slots=slots,
            context=context,
            flags=(lib.POISON if poison else 0) | (0 if graphs else lib.NO_GRAPHS),
        )
        pointer = ctypes.c_void_p()
        status = self._library.dsv4c_session_create(handle.pointer, ctypes.byref(options), ctypes.byref(pointer))
        lib.check(status)
        release = self._library.dsv4c_session_destroy
        return Session(Handle(pointer.value, release), self.info, slots, context)

    def generate(
        self,
        prompt_ids: Ids,
        max_new_tokens: int = 128,
        sampling: Sampling = Sampling(),
        stop_ids: Sequence[int] | None = None,
        context: int | None = None,
    ) -> Iterator[int]:
        """Continue a prompt token by token, up to a stop token, which is not yielded (None: the model's end tokens)."""
        prompt = int32_array(prompt_ids, "prompt_ids")
        if len(prompt) == 0:
            raise SessionError("the prompt is empty", hint="give at least one token, such as the begin token")
        session = self.session(1, len(prompt) + max(max_new_tokens, 0) if context is None else context)
        stops = frozenset(self.info.eos_token_ids if stop_ids is None else stop_ids)
        return _generate(session, prompt, max_new_tokens, sampling, stops)


def _generate(
    session: Session, prompt: IntArray, max_new_tokens: int, sampling: Sampling, stops: frozenset[int]
) -> Iterator[int]:
    with session:
        for token in continue_prompt(session, prompt, max_new_tokens, sampling):
            if token in stops:
                return
            yield token


def continue_prompt(session: Session, prompt: IntArray, max_new_tokens: int, sampling: Sampling) -> Iterator[int]:
    """The tokens that follow `prompt`, which the empty slot 0 takes."""
    rows = prompt
    position = 0
    for _ in range(max_new_tokens):
        count = len(rows)
        positions = np.arange(position, position + count, dtype=np.int32)
        token = int(session.sample(rows, np.zeros(count, np.int32), positions, [count - 1], sampling)[0])
        yield token
        rows = np.array([token], np.int32)
        position += count
