"""Looped model families: what a checkpoint's config and tensors must be, and the equations they feed."""
