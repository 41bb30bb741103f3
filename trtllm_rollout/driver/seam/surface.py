"""The names and defaults of the installed tensorrt_llm that the driver rests on, to be compared with what was written down of it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from trtllm_rollout.driver.seam.build import find, installed_version, memory_types

_LLM_ARGS = ("tensorrt_llm.llmapi.llm_args", "tensorrt_llm.llmapi")
# recorded name: (attribute, modules, methods; None: all public ones that are recorded)
_CLASSES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "tensorrt_llm.LLM": ("LLM", ("tensorrt_llm",), ("generate", "generate_async", "shutdown")),
    "tensorrt_llm.AsyncLLM": ("AsyncLLM", ("tensorrt_llm.llmapi", "tensorrt_llm", "tensorrt_llm._torch.async_llm"),
                              ("setup_async", "release", "resume", "update_weights", "collective_rpc", "pause_generation", "resume_generation")),
    "tensorrt_llm.SamplingParams": ("SamplingParams", ("tensorrt_llm.llmapi", "tensorrt_llm.sampling_params"), ()),
    "tensorrt_llm.llmapi.KvCacheConfig": ("KvCacheConfig", ("tensorrt_llm.llmapi",), ()),
    "tensorrt_llm.llmapi.SchedulerConfig": ("SchedulerConfig", ("tensorrt_llm.llmapi",), ()),
    "tensorrt_llm.llmapi.CudaGraphConfig": ("CudaGraphConfig", ("tensorrt_llm.llmapi",), ()),
    "tensorrt_llm.llmapi.RequestOutput": ("RequestOutput", ("tensorrt_llm.llmapi",), ("result", "aresult", "abort")),
    "tensorrt_llm.llmapi.rlhf_utils.WorkerExtension": ("WorkerExtension", ("tensorrt_llm.llmapi.rlhf_utils",),
                                                       ("update_weights", "reset_prefix_cache")),
    "PyExecutor (worker.engine)": ("PyExecutor", ("tensorrt_llm._torch.pyexecutor.py_executor",), ("control_action", "reset_prefix_cache")),
    "ModelLoader (worker.engine.model_engine.model_loader)": ("ModelLoader", ("tensorrt_llm._torch.pyexecutor.model_loader",),
                                                              ("reload", "begin_update_weights", "finalize_update_weights")),
    "GenerationExecutorWorker": ("GenerationExecutorWorker", ("tensorrt_llm.executor.worker",), ("__init__", "generate_async", "shutdown")),
}


def surface() -> dict[str, Any]:
    """{version, classes: {name: {init_args, fields, methods: {name: {params}}}}, tags}, defaults as text; what is not there is left out."""
    classes: dict[str, Any] = {}
    for recorded, (attribute, modules, methods) in _CLASSES.items():
        found = find(attribute, *modules)
        if found is None:
            continue
        entry: dict[str, Any] = {"methods": {m: {"params": _parameters(getattr(found, m))} for m in methods if hasattr(found, m)}}
        fields = _fields(found)
        if fields:
            entry["fields"] = fields
        classes[recorded] = entry
    arguments = find("TorchLlmArgs", *_LLM_ARGS)
    if arguments is not None and "tensorrt_llm.LLM" in classes:
        classes["tensorrt_llm.LLM"]["init_args"] = _fields(arguments)
    memory = memory_types()
    return {"version": installed_version(), "classes": classes, "tags": {m.name: str(m.value) for m in memory} if memory is not None else {}}


def difference(found: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    """What the driver uses of the recorded interface and the installed one lacks, and what is new in it, one line each."""
    out: list[str] = []
    for name, entry in found["classes"].items():
        known = recorded.get("classes", {}).get(name)
        if known is None:
            out.append(f"{name}: not recorded")
            continue
        for kind in ("init_args", "fields"):
            out += _differ(f"{name}.{kind}", entry.get(kind, {}), known.get(kind, {}))
        out += _differ(f"{name}.methods", entry["methods"], {m: v for m, v in known.get("methods", {}).items() if m in _CLASSES[name][2]})
        for method in entry["methods"].keys() & known.get("methods", {}).keys():
            out += _differ(f"{name}.{method}", entry["methods"][method]["params"], known["methods"][method].get("params", {}))
    return out + [f"{name}: recorded, not installed" for name in recorded.get("classes", {}) if name in _CLASSES and name not in found["classes"]]


def _differ(where: str, found: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    lost, new = sorted(known.keys() - found.keys()), sorted(found.keys() - known.keys())
    return [f"{where}: without {', '.join(lost)}"] * bool(lost and found) + [f"{where}: new {', '.join(new)}"] * bool(new and known)


def _fields(kind: Any) -> dict[str, Any]:
    """Name and default of the fields of a dataclass or a pydantic model."""
    if dataclasses.is_dataclass(kind):
        return {f.name: {"default": repr(f.default)} for f in dataclasses.fields(kind) if not f.name.startswith("_")}
    return {name: {"default": repr(getattr(field, "default", None))} for name, field in getattr(kind, "model_fields", {}).items()}


def _parameters(function: Any) -> dict[str, Any]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return {}
    return {name: {"default": "required" if p.default is p.empty else repr(p.default)} for name, p in signature.parameters.items() if name != "self"}
