"""The vLLM plug-in: our attention for DeepSeek-V4.1 inside vLLM's engine.

plugin.py    the entry point: names and models, nothing heavy
hook.py      imported when vLLM resolves the model: wraps the one function that picks the layer
refusals.py  what cannot run and why (no vLLM needed)
backend.py   what the backends declare, in vLLM's terms
builders.py  the window metadata of a step, all rows in one list
layer.py     the attention layers
steps.py     what a layer does with vLLM's tensors: our ops and nothing else (no vLLM needed)
memory.py    KV bytes per token, for the documentation (no vLLM needed)
"""
