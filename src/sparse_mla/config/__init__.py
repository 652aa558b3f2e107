"""Model configuration, layer topology and rotary tables."""
