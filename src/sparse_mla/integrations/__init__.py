"""Plug-ins for engines."""
