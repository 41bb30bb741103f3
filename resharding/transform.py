"""What happens to values on the way from a source tensor to a destination tensor: the one seam that every transport reads through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from resharding.boxes import slices
from resharding.errors import WeightsError
from resharding.plan import Copy


class Transform(Protocol):
    """Applied at the source, so that what travels is already in the destination's dtype."""

    def read(self, copy: Copy, source: Mapping[str, Any]) -> torch.Tensor:
        """The values of `copy`, in the shape of its boxes. A transport casts them to `copy.dtype` as it packs or writes them."""
        ...


class Cast:
    """The values as they are. The cast to the destination dtype is the transport's `copy_`."""

    def read(self, copy: Copy, source: Mapping[str, Any]) -> torch.Tensor:
        """A view of the source tensor. Raises WeightsError for a cast to or from FP8: codes without their scales are not the weights."""
        part: torch.Tensor = copy.src_view.of(source[copy.src_tensor])[slices(copy.src_box)]
        if part.dtype != copy.dtype and (is_fp8(part.dtype) or is_fp8(copy.dtype)):
            raise WeightsError(f"{copy.canonical}: {copy.src_tensor} is {part.dtype} and must arrive as {copy.dtype}, which takes block "
                               "scales; a plain cast would lose them")
        return part


CAST = Cast()


def is_fp8(dtype: torch.dtype) -> bool:
    return dtype == torch.float8_e4m3fn
