"""A chat message as token ids: by the tokenizer's own template, else by the DeepSeek-V4 prompt encoding.

DeepSeek-V4 ships no template file. Its encoding of one exchange without reasoning is

    bos, system text, <｜User｜>, text, <｜Assistant｜>, </think>
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Never

from dsv4c.errors import InputError
from dsv4c.text import Tokenizer

USER_MARKER = "<｜User｜>"
ASSISTANT_MARKER = "<｜Assistant｜>"
# Closes the reasoning before it begins: the answer follows at once.
NO_REASONING_MARKER = "</think>"


@dataclass(frozen=True)
class ChatPrompt:
    """`note` says what a user should know about how the message was encoded."""

    token_ids: list[int]
    note: str | None = None


def encode_chat(tokenizer: Tokenizer, text: str, *, system: str | None, bos_token_id: int | None) -> ChatPrompt:
    """The prompt of a chat with one message, ready for the answer."""
    if tokenizer.chat_template is not None:
        return ChatPrompt(tokenizer.encode(_render(tokenizer, tokenizer.chat_template, text, system)))
    prompt = f"{system or ''}{USER_MARKER}{text}{ASSISTANT_MARKER}{NO_REASONING_MARKER}"
    bos = [] if bos_token_id is None else [bos_token_id]
    missing = [
        marker for marker in (USER_MARKER, ASSISTANT_MARKER, NO_REASONING_MARKER) if not tokenizer.has_token(marker)
    ]
    note = None
    if missing:
        note = f"the tokenizer has no {', '.join(missing)}: sent as plain text, this model was not trained for chat"
    return ChatPrompt(bos + tokenizer.encode(prompt), note)


def _render(tokenizer: Tokenizer, template: str, text: str, system: str | None) -> str:
    """Runs a Jinja template, which is part of the checkpoint and so not trusted, in Jinja's sandbox."""
    sandbox = _import_jinja2_sandbox()
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    try:
        rendered: str = environment.from_string(template).render(
            messages=messages,
            add_generation_prompt=True,
            bos_token=tokenizer.special_text("bos_token"),
            eos_token=tokenizer.special_text("eos_token"),
        )
    except InputError:
        raise
    # Whatever a template does wrong, the template is the input at fault.
    except Exception as error:  # noqa: BLE001
        raise InputError(
            f"the tokenizer's chat template failed: {error}", hint="run without `--chat` and write the prompt out"
        ) from None
    return rendered


def _refuse(message: str) -> Never:
    """`raise_exception(...)` of a template: it does not take this conversation."""
    raise InputError(
        f"the tokenizer's chat template refuses the message: {message}",
        hint="run without `--chat` and write the prompt out",
    )


def _import_jinja2_sandbox() -> ModuleType:
    try:
        import jinja2.sandbox
    except ImportError:
        raise InputError(
            "the tokenizer has a chat template, and jinja2 is not installed to run it",
            hint="pip install jinja2, or run without `--chat`",
        ) from None
    return jinja2.sandbox
