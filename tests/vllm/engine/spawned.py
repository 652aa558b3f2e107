"""What a worker of vLLM does, in a process that `multiprocessing` spawned. Prints one JSON object."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from typing import Any

from fake_hopper import ENVIRONMENT

os.environ.update(ENVIRONMENT)


def select(config: Any, answers: Any) -> None:
    """Resolve the model and ask which layer it takes."""
    import fake_hopper  # noqa: F401
    from vllm.model_executor.model_loader.utils import get_model_architecture
    from vllm.models.deepseek_v41.nvidia import model
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    cls, architecture = get_model_architecture(config.model_config)
    backend = config.attention_config.backend
    answers.put(
        {
            "architecture": architecture,
            "model": f"{cls.__module__}.{cls.__qualname__}",
            "backend": backend.name,
            "is_the_member": backend is type(backend)[backend.name],
            "layer": model._select_dsv4_attn_cls(config).__name__,
        }
    )


def build(config: Any, answers: Any) -> None:
    """Build the whole model, and say what its attention layers are."""
    import fake_hopper
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    torch.cuda.Stream = lambda *args, **kwargs: None  # type: ignore[assignment, misc]
    fake_hopper.start_distributed(config)
    with set_current_vllm_config(config), fake_hopper.default_dtype(torch.bfloat16):
        model = initialize_model(config)
    layers = model.language_model.model.layers
    plan = fake_hopper.plan_caches(config)
    answers.put(
        {
            "model": type(model).__name__,
            "layers": [type(layer.attn).__name__ for layer in layers],
            "sources": [layer.attn.compressed_cache_prefix for layer in layers],
            "kv_cache_dtype": config.cache_config.cache_dtype,
            "widths": {name: plan.caches[name].shape[-1] for name in plan.caches},
        }
    )


if __name__ == "__main__":
    import fake_hopper

    work, backend, kv_cache_dtype = sys.argv[1:4]
    vllm_config = fake_hopper.engine_config(kv_cache_dtype, backend)
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    target = {"select": select, "build": build}[work]
    child = context.Process(target=target, args=(vllm_config, queue))
    child.start()
    child.join()
    print(json.dumps({"exit": child.exitcode, **({} if child.exitcode else queue.get())}))
