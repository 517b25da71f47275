"""Configuration of a model: its architecture, masks, RoPE, device and data types."""
