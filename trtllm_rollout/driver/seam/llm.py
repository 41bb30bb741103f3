"""The public AsyncLLM: its workers are Ray actors, each with one GPU. All methods are coroutines of one event loop."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

from trtllm_rollout.driver.seam.build import Features, find


class Llm:
    """`extension`: dotted name of the class that is mixed into every worker."""

    def __init__(self, features: Features, arguments: dict[str, Any], extension: str) -> None:
        self.features = features
        # by keyword: the first positionals of AsyncLLM are placement groups, not the model
        self._llm = find("AsyncLLM", "tensorrt_llm.llmapi", "tensorrt_llm", "tensorrt_llm._torch.async_llm")(
            ray_worker_extension_cls=extension, **arguments)

    async def start(self) -> None:
        await self._llm.setup_async()

    def generate(self, prompt: Sequence[int], sampling: Any, streaming: bool) -> Any:
        """A result that is awaited, iterated (where streaming) and aborted. A flat list of ids is one prompt."""
        return self._llm.generate_async(inputs=list(prompt), sampling_params=sampling, streaming=streaming)

    async def rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on every worker; what each returned, in worker order."""
        return list(await self._llm.collective_rpc(method=method, args=arguments))

    async def pause(self) -> None:
        """Stop generating, where the build can."""
        if self.features.pause:
            await self._llm.pause_generation()

    async def go_on(self) -> None:
        if self.features.pause:
            await self._llm.resume_generation()

    async def release(self, tags: Sequence[str]) -> None:
        await self._llm.release(tags=list(tags))

    async def resume(self, tags: Sequence[str]) -> None:
        await self._llm.resume(tags=list(tags))

    async def shutdown(self) -> None:
        ended = self._llm.shutdown()
        if inspect.isawaitable(ended):
            await ended
        with contextlib.suppress(ImportError):
            import ray

            ray.shutdown()  # the cluster that the engine started; actors of a lost driver end with it


def ray_is_there() -> bool:
    """Whether Ray imports: the public AsyncLLM runs on nothing else."""
    try:
        import ray  # noqa: F401
    except ImportError:
        return False
    return True
