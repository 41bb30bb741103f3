"""Whether pieces tile a local tensor, and whether regions make up a canonical one."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

from resharding.boxes import Box, first_overlap, inside, subtract_all, volume, whole
from resharding.layout import View


@lru_cache(maxsize=4096)  # layers repeat the same few arrangements
def tiling_fault(shape: tuple[int, ...], places: tuple[tuple[Box, View], ...]) -> str | None:
    """What is wrong with pieces at `places` (box in a view) as a tiling of a local tensor; None where nothing is."""
    if outside := [box for box, view in places if not inside(box, whole(view.shape(shape)))]:
        return f"the piece at {outside[0]} lies outside it"
    by_view: dict[View, list[Box]] = defaultdict(list)
    for box, view in places:
        by_view[view].append(box)
    for boxes in by_view.values():
        if overlap := first_overlap(tuple(boxes)):
            return f"elements would be written twice, by the pieces at {overlap[0]} and {overlap[1]}"
    if len(by_view) > 1 and (clash := _clash(list(by_view))):
        return f"elements would be written twice, through the views {clash[0]} and {clash[1]}"
    if sum(volume(box) for box, _ in places) != volume(whole(shape)):
        return "its pieces leave elements unwritten"
    return None


def _clash(views: list[View]) -> tuple[View, View] | None:
    """Two views of one tensor that share elements: all must select in the same way, differing in index or phase."""
    first = views[0]
    for view in views:
        if (len(view.index), view.transposed, view.step) != (len(first.index), first.transposed, first.step):
            return first, view
    starts = {(view.index, view.start % view.step) for view in views}
    return None if len(starts) == len(views) else (first, views[-1])


@lru_cache(maxsize=65536)
def covered(regions: tuple[Box, ...], shape: tuple[int, ...]) -> bool:
    """Whether the regions make up the whole tensor."""
    left = [whole(shape)]
    if left[0] in regions or not volume(left[0]):
        return True
    for region in set(regions):
        left = subtract_all(left, region)
    return not left
