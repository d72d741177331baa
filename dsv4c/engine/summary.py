"""`dsv4c inspect` of an engine: every fact of the manifest, and of the file around it, in a readable form."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dsv4c.engine.format import Section, SectionFlag, SectionType
from dsv4c.engine.reader import EngineReader


def engine_summary(reader: EngineReader) -> dict[str, Any]:
    """The facts as JSON-ready data; checks the digest of each section it reads."""
    header = reader.header
    return {
        "path": str(reader.path),
        "format_version": header.format_version,
        "file_bytes": header.file_size,
        "digest": reader.digest,
        "world_size": header.world_size,
        "rank": header.rank,
        "sections": [
            {
                "name": kind.name,
                "offset": entry.offset,
                "size_bytes": entry.size,
                "external": str(reader.weights_path()) if entry.flags & SectionFlag.EXTERNAL else None,
                "sha256": entry.sha256.hex(),
            }
            for kind, entry in sorted(reader.sections.items(), key=_place_in_file)
        ],
        "has_goldens": reader.has(SectionType.GOLDENS),
        "tokenizer_files": sorted(reader.tokenizer_files),
        "manifest": reader.manifest,
    }


def _place_in_file(item: tuple[SectionType, Section]) -> tuple[bool, int]:
    """Sorts sections as they lie in the file, one in another file last."""
    _, entry = item
    return bool(entry.flags & SectionFlag.EXTERNAL), entry.offset


def summary_text(summary: dict[str, Any]) -> str:
    """The same for a terminal."""
    manifest = summary["manifest"]
    model, recipe, state = manifest["model"], manifest["recipe"], manifest["state"]
    checkpoint, draft = manifest["checkpoint"], manifest["draft"]
    layers = Counter(f"{la['kind']}/{la['ratio']}" if la["ratio"] else la["kind"] for la in model["layers"])
    hashed = sum(la["hash_routed"] for la in model["layers"])
    encodings = ", ".join(f"{count} {name}" for name, count in checkpoint["encodings"].items())
    lines = [
        f"engine      {summary['path']}, format {summary['format_version']}, {summary['file_bytes']:,} bytes",
        f"digest      {summary['digest']}",
        f"target      {manifest['target']} ({manifest['arch']}), rank {summary['rank']} of {summary['world_size']}",
        f"built by    dsv4c {manifest['dsv4c_version']}",
        f"model       {model['model_type']}, hidden {model['hidden_size']}, vocabulary {model['vocab_size']}, "
        f"context {model['max_position_embeddings']}",
        f"layers      {len(model['layers'])}: {', '.join(f'{n} {kind}' for kind, n in layers.items())}; "
        f"{hashed} hash-routed",
        f"experts     {model['experts']}, {model['experts_per_token']} a token",
        f"checkpoint  {checkpoint['digest']} ({checkpoint['naming']} naming, {checkpoint['tensors']} tensors: "
        f"{encodings})",
        f"weights     {manifest['weight_bytes']:,} bytes",
        *(f"  {line}" for line in weight_lines(manifest["weights"])),
        f"draft       {_draft(draft)}",
        f"numerics    {recipe['numerics']}, KV {recipe['kv']}, index keys {recipe['index_keys']}",
        f"state       {state['bytes_per_slot']:,} bytes a slot and {state['bytes_per_block']:,} a block of "
        f"{state['block_tokens']} tokens",
        *_counts(manifest),
        f"passes      {', '.join(manifest['passes'])}",
        f"kernels     {', '.join(manifest['kernels'])}",
        *code_lines(manifest.get("machine_code", [])),
    ]
    for bucket in manifest["buckets"]:
        saved = 1 - bucket["arena_bytes"] / bucket["arena_unshared_bytes"]
        sm_count = f" on {bucket['sm_count']} SMs" if bucket.get("sm_count") else ""
        calls = f" by {bucket['calls']} kernel calls" if bucket.get("calls", 0) > bucket["launches"] else ""
        lines.append(
            f"bucket      {bucket['kind']:<6} {bucket['tokens']:>4} rows{sm_count}: {bucket['launches']} launches"
            f"{calls}, arena {bucket['arena_bytes']:,} bytes{_saved_text(saved)}, {bucket['bytes_moved']:,} bytes "
            f"moved, {bucket['flops']:,} FLOPs"
        )
    for section in summary["sections"]:
        where = f"in {section['external']}" if section["external"] else f"at {section['offset']:,}"
        lines.append(f"section     {section['name']:<9} {section['size_bytes']:>12,} bytes {where}")
    lines.append(f"tokenizer   {', '.join(summary['tokenizer_files']) or 'none'}")
    lines.append(f"goldens     {'yes' if summary['has_goldens'] else 'no'}")
    if manifest.get("forced"):
        lines.append("forced      built with --force: it may not fit the memory of its target")
    return "\n".join(lines)


def _counts(manifest: Mapping[str, Any]) -> list[str]:
    """Nothing of engines that count nothing, or that were built before there were counts."""
    size = manifest["state"].get("bytes_per_session", 0)
    if not size:
        return []
    model = manifest["model"]
    return [
        f"counts      how often each of {model['experts']} experts of {len(model['layers'])} layers is chosen: "
        f"{size:,} bytes a session"
    ]


def _saved_text(saved: float) -> str:
    """Scratch of kernels may take more than reuse saves."""
    return f" ({saved:.0%} saved)" if saved > 0 else ""


def code_lines(kernels: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line an operator that the engine has machine code for."""
    lines = []
    for operator in sorted({kernel["operator"] for kernel in kernels}):
        own = [kernel for kernel in kernels if kernel["operator"] == operator]
        registers = sorted({kernel["registers"] for kernel in own})
        shared = max(kernel["static_shared_bytes"] + kernel["dynamic_shared_bytes"] for kernel in own)
        spilled = sum(kernel["spill_bytes"] > 0 for kernel in own)
        lines.append(
            f"  {operator:<19}{len(own):>3} {'kernel' if len(own) == 1 else 'kernels'}, "
            + " to ".join(str(count) for count in (registers[0], *registers[1:][-1:]))
            + f" registers, at most {shared:,} bytes of shared memory"
            + (f", {spilled} with spills" if spilled else "")
        )
    return lines


def weight_lines(totals: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line a class of tensor: encoding, tensors, bytes, and the error where the build quantised it."""
    return [
        f"{total['kind']:<14}{total['encoding']:<11}{total['tensors']:>6} {_tensors(total)} "
        f"{total['size_bytes']:>15,} bytes" + _made(total)
        for total in totals
    ]


def _tensors(total: Mapping[str, Any]) -> str:
    return "tensor " if total["tensors"] == 1 else "tensors"


def _made(total: Mapping[str, Any]) -> str:
    if total["made_of"] is None:
        return ""
    return f", made of {total['made_of']}, relative error {total['relative_error']:.3g}"


def _draft(draft: dict[str, Any]) -> str:
    if not draft["tensors"]:
        return "none in the checkpoint"
    return f"{draft['kind']}, {draft['tensors']} tensors: read, not compiled yet"
