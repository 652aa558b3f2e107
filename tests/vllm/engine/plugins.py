"""What vLLM knows of us in a fresh process: as its API server starts, on no particular platform.

Prints one JSON object. With `pickled` arguments it unpickles them first, before any plug-in is loaded, as a
worker does with its configuration.
"""

from __future__ import annotations

import json
import pickle
import sys
from importlib import metadata

blobs = [bytes.fromhex(argument) for argument in sys.argv[1:]]
unpickled = [pickle.loads(blob) for blob in blobs]

from vllm.model_executor.models.registry import ModelRegistry  # noqa: E402
from vllm.plugins import load_general_plugins  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

entries = metadata.entry_points(group="vllm.general_plugins")
load_general_plugins()
registered = [name for name in AttentionBackendEnum.__members__ if name.startswith("SPARSE_MLA")]
if registered:
    from sparse_mla.integrations.vllm.plugin import register

    register()  # plug-ins may be run several times
print(
    json.dumps(
        {
            "entry_points": {entry.name: entry.value for entry in entries},
            "unpickled": [member.name for member in unpickled],
            "are_members": [member is AttentionBackendEnum[member.name] for member in unpickled],
            "names": registered,
            "count": len(list(AttentionBackendEnum)),
            "modules": {
                name: ModelRegistry.models[name].module_name
                for name in ("DeepseekV41ForCausalLM", "DSparkV41DraftModel")
            },
            "models_imported": "vllm.models.deepseek_v41.attention" in sys.modules,
            "ours_imported": "sparse_mla" in sys.modules,
        }
    )
)
