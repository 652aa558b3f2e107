"""The support matrix of the README, made from the declarations."""

from __future__ import annotations

from sparse_mla.backends.declarations import MegaAttentionBackend
from sparse_mla.backends.problem import KNOWN_MACHINES, DeviceInfo, Problem
from sparse_mla.backends.select import explain, select
from sparse_mla.cache.records import MXFP8, NVFP4


def support_matrix() -> str:
    """Markdown: for each machine what `auto` takes for fused attention, and what the others say."""
    problem = Problem(
        window_record=MXFP8.name,
        compressed_record=NVFP4.name,
        window_keys=128,
        compressed_keys=512,
        output=MegaAttentionBackend.output,
    )
    lines = [
        "| machine | compute capability | `auto` takes | also by name | refused, and why |",
        "|---|---|---|---|---|",
    ]
    for name in KNOWN_MACHINES:
        device = DeviceInfo.from_capability(name)
        chosen = select(problem, device, "auto").name
        others = [(backend.name, why) for backend, why in explain(problem, device)]
        also = ", ".join(f"`{body}`" for body, why in others if not why and body != chosen)
        refused = "<br>".join(f"`{body}`: {'; '.join(why)}" for body, why in others if why)
        capability = "-" if device.capability is None else name
        lines.append(
            f"| {device.name} | {capability} | `{chosen}` | {also or '-'} | {refused or '-'} |"
        )
    return "\n".join(lines)
