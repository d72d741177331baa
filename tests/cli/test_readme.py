"""The README's Python example runs."""

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_python_example(tiny_engine: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    exec(example.replace("model.cpu.dsv4c", str(tiny_engine)), names)
    assert isinstance(names["state"], bytes)
