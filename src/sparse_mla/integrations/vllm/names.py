"""Names and versions that the parts of the plug-in share."""

from __future__ import annotations

MEGA = "SPARSE_MLA_MEGA_DSV41"
"""Query rotation, attention and inverse rotation in one launch; 528-byte window, 288-byte compressed rows."""
SPARSE = "SPARSE_MLA_DSV41"
"""Attention alone: the writer rotates the query and vLLM rotates the output back; 528-byte rows."""
BACKENDS = {
    MEGA: "sparse_mla.integrations.vllm.backend.MegaBackend",
    SPARSE: "sparse_mla.integrations.vllm.backend.SparseBackend",
}
"""vLLM's `--attention-backend` name: the class that declares it."""
MODELS = {
    "DeepseekV41ForCausalLM": "DeepseekV41ForCausalLM",
    "DSparkV41DraftModel": "DSparkDeepseekV4ForCausalLM",
}
"""Architecture of a checkpoint: vLLM's own class, which `hook` hands on unchanged."""
HOOK = "sparse_mla.integrations.vllm.hook"
TESTED_VERSIONS = ("0.33.0",)
"""vLLM releases whose private names and call forms this plug-in was tested with."""


def is_tested(version: str) -> bool:
    """Whether a version of vLLM, local part aside, is a tested one."""
    return version.split("+")[0] in TESTED_VERSIONS
