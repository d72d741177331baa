"""The text form of a plan: one line a launch, for dumps, goldens and diffs."""

from dsv4c.plan.execution_plan import Arg, BucketPlan, ExecutionPlan, TensorRef
from dsv4c.step_abi import Dim, Space

_SYMBOLS = {Dim.TOKENS: "T", Dim.LOGITS: "R", Dim.SLOTS: "S", Dim.BLOCKS: "B", Dim.TABLE: "M"}


def format_plan(plan: ExecutionPlan) -> str:
    """The whole plan: state planes, then every bucket."""
    lines = [f"weights {plan.weights.size_bytes} bytes in {len(plan.weights.extents)} extents", ""]
    for index, plane in enumerate(plan.state.planes):
        lines.append(f"state {index} %{plane.name}: {plane.rows} rows of {plane.row_bytes} bytes a {plane.kind.unit}")
    for bucket in plan.buckets:
        lines += ["", *_bucket(bucket)]
    return "\n".join(lines) + "\n"


def _bucket(bucket: BucketPlan) -> list[str]:
    saved = 1 - bucket.arena_bytes / bucket.unshared_bytes
    head = (
        f"bucket {bucket.kind.name.lower()} {bucket.tokens}: {len(bucket.launches)} launches, "
        f"arena {bucket.arena_bytes} bytes ({saved:.0%} saved by reuse)"
    )
    lines = [head]
    for number, launch in enumerate(bucket.launches):
        outputs = ", ".join(map(format_arg, launch.outputs))
        args = ", ".join(map(format_arg, launch.args))
        only = f" only {launch.flags.name}" if launch.flags else ""
        lines.append(f"{number:4} %{launch.name} = {launch.kernel}({args}) -> {outputs or '()'}{only}")
    return lines


def format_arg(arg: Arg) -> str:
    """`arena+1024 f32[T, 256]`; a stride that is not dense is shown."""
    if not isinstance(arg, TensorRef):
        return repr(arg)
    where = arg.space.name.lower()
    place = f"{where}{arg.index}" if arg.space in (Space.STATE, Space.INPUT, Space.OUTPUT) else where
    sizes = ", ".join(_SYMBOLS.get(dim, str(size)) for dim, size in zip(arg.dims, arg.sizes, strict=True))
    dense = _is_dense(arg)
    strides = "" if dense else f" strides {list(arg.strides)}"
    return f"{place}+{arg.offset} {arg.dtype.name.lower()}[{sizes}]{strides}"


def _is_dense(tensor: TensorRef) -> bool:
    expected = 1
    for size, stride in zip(reversed(tensor.sizes), reversed(tensor.strides), strict=True):
        if stride not in (expected, -1):
            return False
        expected *= size
    return True
