"""The entry point `vllm.general_plugins`: runs in every process of vLLM, possibly several times.

It makes the backends' names known and lets vLLM resolve two architectures through `hook`. Nothing of
vLLM's models is imported here: that takes seconds and decides on the platform.
"""

from __future__ import annotations

import functools
from typing import Any

from sparse_mla.integrations.vllm.names import (
    BACKENDS,
    HOOK,
    MODELS,
    TESTED_VERSIONS,
    is_tested,
)


def register() -> None:
    """Register names and models; on a vLLM that was not tested, only say so and change nothing."""
    import vllm
    from vllm.logger import init_logger
    from vllm.model_executor.models.registry import ModelRegistry

    if not is_tested(vllm.__version__):
        init_logger(f"vllm.{__name__}").warning(
            "sparse_mla: vLLM %s was not tested (tested: %s); the attention backends %s are not "
            "registered and vLLM is left as it is. Install a tested vLLM to use them.",
            vllm.__version__,
            ", ".join(TESTED_VERSIONS),
            " and ".join(BACKENDS),
        )
        return
    for name in BACKENDS:
        backend_member(name)
    for architecture, model in MODELS.items():
        ModelRegistry.register_model(architecture, f"{HOOK}:{model}")


def backend_member(name: str) -> Any:
    """The member of vLLM's backend enum with this name, registered first if it is new.

    vLLM sends its configuration to workers before they load plug-ins, and pickles members by value, which
    a fresh process does not know yet. This member is pickled as a call of this function instead.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if name not in AttentionBackendEnum.__members__:
        register_backend(name, BACKENDS[name])
    member = AttentionBackendEnum[name]
    member.__reduce_ex__ = functools.partial(_reduce, name)
    return member


def _reduce(name: str, protocol: int) -> tuple[Any, tuple[str]]:
    del protocol
    return backend_member, (name,)
