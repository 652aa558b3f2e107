"""Byte layouts, the codec, paged views and pools of the quantised caches."""
