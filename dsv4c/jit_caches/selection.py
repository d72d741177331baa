"""Which entries go: by their last use, and by what all that are kept may weigh."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from dsv4c.jit_caches.survey import Survey

_FOREVER_NS = 1 << 62


@dataclass
class Cut:
    """Entries used before a moment go; of those used at that very moment, as many as hold `ties_bytes`."""

    before_ns: int
    ties_bytes: int = 0

    def selects(self, use_ns: int, disk_bytes: int) -> bool:
        if use_ns != self.before_ns or self.ties_bytes <= 0:
            return use_ns < self.before_ns
        self.ties_bytes -= disk_bytes
        return True

    def copy(self) -> "Cut":
        return Cut(self.before_ns, self.ties_bytes)


def make_cut(surveys: Iterable[Survey], now_ns: int, older_than_ns: int | None, keep_bytes: int | None) -> Cut:
    """With neither limit, everything goes; with both, what either of them lets go."""
    if older_than_ns is None and keep_bytes is None:
        return Cut(_FOREVER_NS)
    by_age = Cut(0 if older_than_ns is None else now_ns - older_than_ns)
    if keep_bytes is None:
        return by_age
    ours = [survey for survey in surveys if survey.is_ours]
    excess = sum(survey.disk_bytes for survey in ours) - keep_bytes
    use_ns, sizes = array("q"), array("q")
    for survey in ours:
        if survey.skipped is None:
            use_ns.extend(survey.ages.use_ns)
            sizes.extend(survey.ages.disk_bytes)
    by_size = Cut(0)
    for index in sorted(range(len(use_ns)), key=use_ns.__getitem__):
        if excess <= 0:
            break
        same = use_ns[index] == by_size.before_ns
        by_size = Cut(use_ns[index], sizes[index] + (by_size.ties_bytes if same else 0))
        excess -= sizes[index]
    return by_size if by_size.before_ns >= by_age.before_ns else by_age


@dataclass(frozen=True)
class Selected:
    """What a cut takes from one place."""

    entries: int
    files: int
    disk_bytes: int


def count_selected(survey: Survey, cut: Cut) -> Selected:
    """Uses up the ties of the cut: called for every place, in the order of removal."""
    entries = files = disk_bytes = 0
    if survey.skipped is None:
        ages = survey.ages
        for use_ns, size, count in zip(ages.use_ns, ages.disk_bytes, ages.files, strict=True):
            if cut.selects(use_ns, size):
                entries, files, disk_bytes = entries + 1, files + count, disk_bytes + size
    return Selected(entries, files, disk_bytes)
