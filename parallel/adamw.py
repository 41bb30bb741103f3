"""AdamW with the state shape of apex's and Transformer Engine's FusedAdam, on torch's fused kernel.

`step` lives in the parameter group, not beside each parameter. Megatron-Core's distributed optimizer saves and resumes
that shape exactly; with torch's AdamW its resume gives wrong step counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim._functional import adam, adamw


class FusedAdam(torch.optim.Optimizer):
    """Adam (`adam_w_mode=False`) or AdamW (Loshchilov & Hutter, arXiv:1711.05101), decoupled weight decay."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, adam_w_mode: bool = True, **unused: Any) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        update = adamw if self.adam_w_mode else adam
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p].update(exp_avg=torch.zeros_like(p.data), exp_avg_sq=torch.zeros_like(p.data))
            # the kernel advances the step tensors it is given: hand it the number before this step
            steps = [torch.tensor(float(group["step"] - 1), device=p.device) for p in params]
            update(params, [p.grad for p in params], [self.state[p]["exp_avg"] for p in params],
                   [self.state[p]["exp_avg_sq"] for p in params], [], steps, fused=True, amsgrad=False,
                   beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"],
                   eps=group["eps"], maximize=False)


def install_where_missing() -> None:
    """Give Megatron-Core this optimizer where neither Transformer Engine nor apex brought a fused one."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    optimizer.Adam = distributed.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = True
    distributed.USING_APEX_OPTIMIZER = True
