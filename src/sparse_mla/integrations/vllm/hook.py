"""Imported by vLLM when it resolves a DeepSeek-V4.1 model: wraps the function that picks the layer.

Keep this file small: vLLM caches what it learnt of a model under the hash of the file that names it.
"""

from __future__ import annotations

from sparse_mla.integrations.vllm.select import wrap_selector

wrap_selector()

from vllm.models.deepseek_v41 import DeepseekV41ForCausalLM, DSparkDeepseekV4ForCausalLM  # noqa: E402

__all__ = ["DSparkDeepseekV4ForCausalLM", "DeepseekV41ForCausalLM"]
